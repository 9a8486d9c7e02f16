const { Channel, invoke } = window.__TAURI__.core;
const [form, question, answer] = ["form", "question", "answer"].map((id) => document.getElementById(id));
let messages = [];

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const asked = [...messages, { role: "user", content: question.value }];
  answer.textContent += `\n> ${question.value}\n`;
  question.value = "";
  let content = "";
  const texts = new Channel((text) => {
    content += text;
    answer.textContent += text;
  });
  try {
    await invoke("ask", { messages: asked, texts });
    messages = [...asked, { role: "assistant", content }];
  } catch (error) {
    answer.textContent += error;
  }
});
