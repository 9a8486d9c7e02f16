//! Asks once, without a window: `cargo run "Once upon a time"`.

use llamasup_sidecar::{Llamasup, chat};
use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    match ask() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn ask() -> Result<(), Box<dyn Error>> {
    let program = env::var_os("LLAMASUP").unwrap_or("llamasup".into());
    let model = env::var_os("LLAMASUP_MODEL").unwrap_or("demo".into());
    let llamasup = Llamasup::start(Command::new(program), &model)?;
    let ready = llamasup.ready()?;
    let question = env::args().nth(1).unwrap_or("Once upon a time".into());
    let messages = serde_json::json!([{"role": "user", "content": question}]);
    chat(ready["url"].as_str().unwrap_or_default(), &messages, |text| {
        print!("{text}");
        let _ = io::stdout().flush();
    })?;
    println!();
    match llamasup.stop()? {
        status if status.success() => Ok(()),
        status => Err(format!("llamasup ended: {status}").into()),
    }
}
