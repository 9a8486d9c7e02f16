const { core } = window.__TAURI__;
const ids = ["form", "question", "ask", "answer"];
const [form, question, button, answer] = ids.map((id) => document.getElementById(id));
let messages = [];

core.invoke("reason_of_end").then((reason) => (answer.textContent += `\n${reason}\n`));

form.addEventListener("submit", async (submission) => {
  submission.preventDefault();
  const asked = [...messages, { role: "user", content: question.value }];
  answer.textContent += `\n> ${question.value}\n`;
  question.value = "";
  button.disabled = true; // one answer at a time
  let content = "";
  const texts = new core.Channel((text) => {
    content += text;
    answer.textContent += text;
  });
  try {
    await core.invoke("ask", { messages: asked, texts });
    messages = [...asked, { role: "assistant", content }];
  } catch (error) {
    answer.textContent += error;
  }
  button.disabled = false;
});
