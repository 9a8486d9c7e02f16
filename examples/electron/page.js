const [form, question, answer] = ["form", "question", "answer"].map((id) => document.getElementById(id));
const messages = [];

model.onText((text) => (answer.textContent += text));
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  messages.push({ role: "user", content: question.value });
  const begin = (answer.textContent += `\n> ${question.value}\n`).length;
  question.value = "";
  try {
    await model.chat(messages);
    messages.push({ role: "assistant", content: answer.textContent.slice(begin) });
  } catch (error) {
    answer.textContent += error.message;
  }
});
