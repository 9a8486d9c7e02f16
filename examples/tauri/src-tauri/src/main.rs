//! A window that chats with a model. llamasup starts and ends with the application.
#![cfg_attr(not(debug_assertions), windows_subsystem = "windows")]

use llamasup_sidecar::{chat, Llamasup};
use serde_json::Value;
use std::{env, error::Error, process::Command, sync::Arc};
use tauri::{async_runtime::spawn_blocking, ipc::Channel, App, Manager, RunEvent, State};

/// Or the reason why it could not be started.
type Started = Result<Arc<Llamasup>, String>;

/// llamasup refuses requests of web pages with a foreign origin, so this process sends them.
#[tauri::command]
async fn ask(messages: Value, texts: Channel<String>, llamasup: State<'_, Started>) -> Result<(), String> {
    let llamasup = llamasup.inner().clone()?;
    let answer = move || {
        let ready = llamasup.ready()?;
        let show = |text: &str| drop(texts.send(text.into()));
        chat(ready["url"].as_str().unwrap_or_default(), &messages, show).map_err(|error| error.to_string())
    };
    spawn_blocking(answer).await.map_err(|error| error.to_string())?
}

/// Waits for the end of llamasup. An event could come before the page listens to it.
#[tauri::command]
async fn reason_of_end(llamasup: State<'_, Started>) -> Result<String, String> {
    match llamasup.inner().clone() {
        Ok(llamasup) => spawn_blocking(move || llamasup.ended()).await.map_err(|error| error.to_string()),
        Err(reason) => Ok(reason),
    }
}

/// The folder of scripts/bundle is a resource. llama-server is an external program: Tauri takes it from
/// binaries/llama-server-TARGET-TRIPLE, and puts it next to the program of the application.
fn start(app: &App) -> Result<Llamasup, Box<dyn Error>> {
    let suffix = env::consts::EXE_SUFFIX;
    let folder = app.path().resource_dir()?.join("llamasup");
    let mut command = Command::new(folder.join(format!("llamasup{suffix}")));
    command.env("LLAMASUP_RUNTIME", env::current_exe()?.with_file_name(format!("llama-server{suffix}")));
    let model = env::var_os("LLAMASUP_MODEL").unwrap_or("demo".into());
    Ok(Llamasup::start(command, &model)?)
}

fn main() {
    let app = tauri::Builder::default()
        .setup(|app| {
            let started = start(app).map(Arc::new);
            let started: Started = started.map_err(|error| format!("llamasup could not be started: {error}"));
            app.manage(started);
            Ok(())
        })
        .invoke_handler(tauri::generate_handler![ask, reason_of_end])
        .build(tauri::generate_context!())
        .expect("the application cannot be started");
    app.run(|app, event| {
        if let (RunEvent::Exit, Some(started)) = (event, app.try_state::<Started>()) {
            if let Ok(llamasup) = started.inner() {
                let _ = llamasup.stop(); // returns when all that it has started has ended
            }
        }
    });
}
