//! A llamasup that lives as long as this process: `ready()` waits for its address, `stop()` ends it.

use serde_json::Value;
use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const STOP_TIMEOUT: Duration = Duration::from_secs(45);

pub struct Llamasup {
    child: Mutex<Child>,
    events: Mutex<mpsc::Receiver<Value>>,
    ready: OnceLock<Result<Value, String>>,
}

impl Llamasup {
    /// `command` is the program llamasup, with its environment.
    pub fn start(mut command: Command, model: &str) -> io::Result<Self> {
        #[cfg(windows)] // no console
        std::os::windows::process::CommandExt::creation_flags(&mut command, 0x0800_0000);
        let mut child = command
            .args(["run", model, "--sidecar"])
            .stdin(Stdio::piped()) // its end, also by our death, is what stops llamasup
            .stdout(Stdio::piped()) // events
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines();
        let (sender, events) = mpsc::channel();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let event: Value = serde_json::from_str(&line).unwrap_or_default();
                if event["event"] == "ready" {
                    let _ = sender.send(event); // there are other events, which an application may show
                }
            }
        });
        Ok(Self { child: child.into(), events: events.into(), ready: OnceLock::new() })
    }

    /// The event with `url`; an error if llamasup ends before it.
    pub fn ready(&self) -> Result<Value, String> {
        let first = || self.events.lock().unwrap().recv();
        let how = |_| self.stop().map_or_else(|error| error.to_string(), |status| status.to_string());
        self.ready.get_or_init(|| first().map_err(|end| format!("llamasup ended: {}", how(end)))).clone()
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
