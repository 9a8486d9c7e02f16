//! A llamasup that lives as long as this process: `ready()` waits for its address, `stop()` ends it.

use serde_json::Value;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

const STOP_TIMEOUT: Duration = Duration::from_secs(45);
const LINES_OF_REASON: usize = 20;

pub struct Llamasup {
    child: Arc<Mutex<Child>>,
    ready: Arc<OnceLock<Result<Value, String>>>,
    ended: Arc<OnceLock<String>>,
}

impl Llamasup {
    /// `command` is the program llamasup, with its environment.
    pub fn start(mut command: Command, model: impl AsRef<OsStr>) -> io::Result<Self> {
        #[cfg(windows)] // no console
        std::os::windows::process::CommandExt::creation_flags(&mut command, 0x0800_0000);
        command.arg("run").arg(model).arg("--sidecar");
        // llamasup stops when its standard input ends, also if this process is killed.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let events = BufReader::new(child.stdout.take().expect("a pipe")).split(b'\n');
        let messages = child.stderr.take().expect("a pipe");
        let messages = thread::spawn(|| last_lines(messages));
        let llamasup = Self { child: Arc::new(child.into()), ready: Arc::default(), ended: Arc::default() };
        let (child, ready, ended) = (llamasup.child.clone(), llamasup.ready.clone(), llamasup.ended.clone());
        thread::spawn(move || {
            for line in events.map_while(Result::ok) {
                let event: Value = serde_json::from_slice(&line).unwrap_or_default();
                if event["event"] == "ready" {
                    let _ = ready.set(Ok(event)); // there are other events, which an application may show
                }
            }
            let said = messages.join().unwrap_or_default();
            let status = child.lock().unwrap().wait();
            let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            let reason = format!("llamasup ended: {status}\n{said}");
            let _ = ready.set(Err(reason.clone()));
            let _ = ended.set(reason);
        });
        Ok(llamasup)
    }

    /// The event with `url`; the reason of the end if llamasup ends before it.
    pub fn ready(&self) -> Result<Value, String> {
        self.ready.wait().clone()
    }

    /// Waits for the end, and returns its reason.
    pub fn ended(&self) -> String {
        self.ended.wait().clone()
    }

    /// Returns when llamasup and all that it has started have ended.
    pub fn stop(&self) -> io::Result<ExitStatus> {
        let mut child = self.child.lock().unwrap();
        drop(child.stdin.take());
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        child.kill()?;
        child.wait()
    }
}

fn last_lines(output: ChildStderr) -> String {
    let mut lines = Vec::new();
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        lines.push(String::from_utf8_lossy(&line).into_owned());
        lines.drain(..lines.len().saturating_sub(LINES_OF_REASON));
    }
    lines.join("\n")
}
