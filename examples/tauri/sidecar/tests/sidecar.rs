//! With a real llamasup: LLAMASUP is its command, LLAMASUP_MODEL and LLAMASUP_RUNTIME what it serves.
//! LLAMASUP_TEST_STALLING_RUNTIME is a llama-server whose answers begin and never end.
#![cfg(target_os = "linux")]

use llamasup_sidecar::Llamasup;
use std::env;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);

/// The program of this crate, with a run-time folder of its own.
struct Application {
    command: Command,
    folder: PathBuf,
}

impl Application {
    fn new(name: &str) -> Self {
        // Short, since sockets will be in it.
        let folder = PathBuf::from(format!("/tmp/llamasup-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_llamasup-sidecar"));
        command.env("XDG_RUNTIME_DIR", &folder).stdin(Stdio::null());
        Self { command, folder }
    }

    /// The processes with this folder in their environment: the program, llamasup, and what that has started.
    fn processes(&self) -> Vec<PathBuf> {
        let folder = self.folder.to_str().unwrap().as_bytes();
        let is_ours = |process: &PathBuf| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            environment.windows(folder.len()).any(|part| part == folder)
        };
        fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).filter(is_ours).collect()
    }

    fn run_folders(&self) -> usize {
        fs::read_dir(self.folder.join("llamasup")).map_or(0, |entries| entries.count())
    }

    fn await_nothing_left(self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.processes().is_empty() || self.run_folders() > 0 {
            assert!(Instant::now() < deadline, "left: {:?}", self.processes());
            sleep(Duration::from_millis(10));
        }
        fs::remove_dir_all(self.folder).unwrap();
    }
}

#[test]
fn answer_arrives_and_stop_leaves_nothing() {
    let mut application = Application::new("answer");
    let done = application.command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(done.stdout.len() > 10);
    application.await_nothing_left();
}

#[test]
fn kill_within_an_answer_leaves_nothing() {
    let mut application = Application::new("kill");
    let stalling = env::var_os("LLAMASUP_TEST_STALLING_RUNTIME").expect("LLAMASUP_TEST_STALLING_RUNTIME");
    application.command.env("LLAMASUP_RUNTIME", stalling);
    let mut process = application.command.stdout(Stdio::piped()).spawn().unwrap();
    process.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap(); // text of the answer
    assert!(application.processes().len() >= 3); // with llamasup and llama-server
    assert_eq!(application.run_folders(), 1);
    process.kill().unwrap(); // SIGKILL
    process.wait().unwrap();
    application.await_nothing_left();
}

#[test]
fn start_that_fails_is_an_error_with_the_exit_code() {
    let mut application = Application::new("missing");
    let done = application.command.env("LLAMASUP_MODEL", "/no/such.gguf").output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success());
    assert!(said.contains("llamasup ended: exit status: 66"), "{said}");
    assert!(said.contains("/no/such.gguf"), "{said}"); // what llamasup wrote to its standard error
    application.await_nothing_left();
}

#[test]
fn application_gets_the_reason_of_an_end_also_after_lines_that_are_no_events() {
    let mut command = Command::new("sh");
    command.args(["-c", "echo hello; printf '{\"event\":\"rea'; echo because >&2; exit 3"]);
    let llamasup = Llamasup::start(command, "demo").unwrap();
    let reason = llamasup.ended();
    assert_eq!(reason, "llamasup ended: exit status: 3\nbecause");
    assert_eq!(llamasup.ready(), Err(reason));
    assert_eq!(llamasup.stop().unwrap().code(), Some(3));
}

#[test]
fn address_arrives_also_after_a_line_that_is_not_utf_8() {
    let mut command = Command::new("sh");
    command.args(["-c", r#"printf '\377\n5\n{"event":"ready","url":"http://a"}\n'; cat; true"#]);
    let llamasup = Llamasup::start(command, "demo").unwrap();
    assert_eq!(llamasup.ready().unwrap()["url"], "http://a");
    assert!(llamasup.stop().unwrap().success());
}
