const ids = ["form", "question", "ask", "answer"];
const [form, question, button, answer] = ids.map((id) => document.getElementById(id));
let messages = [];

model.onText((text) => (answer.textContent += text));
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const asked = [...messages, { role: "user", content: question.value }];
  const begin = (answer.textContent += `\n> ${question.value}\n`).length;
  question.value = "";
  button.disabled = true; // one answer at a time
  try {
    await model.chat(asked);
    messages = [...asked, { role: "assistant", content: answer.textContent.slice(begin) }];
  } catch (error) {
    answer.textContent += error.message;
  }
  button.disabled = false;
});
