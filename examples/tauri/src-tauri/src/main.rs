//! A window that chats with a model. llamasup starts and ends with the application.
#![cfg_attr(not(debug_assertions), windows_subsystem = "windows")]

use llamasup_sidecar::{chat, Llamasup};
use serde_json::Value;
use std::{env, error::Error, process::Command, sync::Arc};
use tauri::{async_runtime::spawn_blocking, ipc::Channel, App, Emitter, Manager, RunEvent, State};

/// llamasup refuses requests of web pages with a foreign origin, so this process sends them.
#[tauri::command]
async fn ask(messages: Value, texts: Channel<String>, llamasup: State<'_, Arc<Llamasup>>) -> Result<(), String> {
    let llamasup = llamasup.inner().clone();
    let answer = move || {
        let ready = llamasup.ready()?;
        let show = |text: &str| drop(texts.send(text.into()));
        chat(ready["url"].as_str().unwrap_or_default(), &messages, show).map_err(|error| error.to_string())
    };
    spawn_blocking(answer).await.map_err(|error| error.to_string())?
}

/// The folder of scripts/bundle is a resource. llama-server is an external program: Tauri takes it from
/// binaries/llama-server-TARGET-TRIPLE, and puts it next to the program of the application.
fn start(app: &mut App) -> Result<(), Box<dyn Error>> {
    let suffix = env::consts::EXE_SUFFIX;
    let folder = app.path().resource_dir()?.join("llamasup");
    let mut command = Command::new(folder.join(format!("llamasup{suffix}")));
    command.env("LLAMASUP_RUNTIME", env::current_exe()?.with_file_name(format!("llama-server{suffix}")));
    let model = env::var("LLAMASUP_MODEL").unwrap_or("demo".into());
    let handle = app.handle().clone();
    let llamasup = Llamasup::start(command, &model, move |reason| drop(handle.emit("ended", reason)))?;
    app.manage(Arc::new(llamasup));
    Ok(())
}

fn main() {
    let app = tauri::Builder::default()
        .setup(start)
        .invoke_handler(tauri::generate_handler![ask])
        .build(tauri::generate_context!())
        .expect("the application cannot be started");
    app.run(|app, event| {
        if let RunEvent::Exit = event {
            let _ = app.state::<Arc<Llamasup>>().stop(); // returns when all that it has started has ended
        }
    });
}
