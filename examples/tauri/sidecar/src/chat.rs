//! A request that llamasup answers.

use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, BufReader};

/// Shows the pieces of text of a streamed answer.
pub fn chat(url: &str, messages: &Value, mut show: impl FnMut(&str)) -> Result<(), Box<dyn Error>> {
    let config = ureq::Agent::config_builder().http_status_as_error(false).proxy(None);
    let body = json!({"messages": messages, "stream": true, "max_tokens": 128});
    let mut answer = config.build().new_agent().post(format!("{url}/v1/chat/completions")).send_json(body)?;
    if answer.status() != 200 {
        return Err(message_of(&answer.body_mut().read_json()?));
    }
    for line in BufReader::new(answer.into_body().into_reader()).lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
        let event: Value = serde_json::from_str(data)?;
        if event.get("error").is_some() {
            return Err(message_of(&event)); // llama-server ended within the answer
        }
        show(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    Ok(())
}

fn message_of(problem: &Value) -> Box<dyn Error> {
    problem["error"]["message"].as_str().unwrap_or("an error without a message").into()
}
