mod chat;
mod process;

pub use chat::chat;
pub use process::Llamasup;
