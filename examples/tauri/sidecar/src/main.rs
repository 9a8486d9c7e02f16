//! Asks once, without a window: `cargo run "Once upon a time"`.

use llamasup_sidecar::{Llamasup, chat};
use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    let words = env::var("LLAMASUP").unwrap_or("llamasup".into());
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    let llamasup = Llamasup::start(command, &env::var("LLAMASUP_MODEL").unwrap_or("demo".into()))?;
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
