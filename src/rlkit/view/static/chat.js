/** Draw messages of a conversation: roles, thinking, tool calls and results, images, forced text. */
import { fold, h, markInvisible, textBlock, textLine } from "rlkit/ui";
/** Draw a message. forced: pieces of text that were put into the reply and not sampled; limit: characters shown at first. */
function drawMessage(message, { forced = [], limit } = {}) {
  const { role, name, thinking, tool_calls: calls = [], tool_call_id: callId } = message;
  const label = h("header", null, h("span", { class: "role" }, textLine(role, 40)), name && h("span", { class: "tag" }, textLine(name, 60)), callId && h("span", { class: "muted mono" }, textLine(callId, 40)));
  const roleClass = `role-${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}`;
  return h("article", { class: `message ${roleClass}`, dataset: { row: "" }, tabIndex: -1 }, label,
    thinking && fold(`Thinking · ${thinking.length.toLocaleString("en")} characters`, drawText(thinking, forced, limit), { kind: "thinking" }),
    drawContent(message.content, forced, limit), calls.map((call) => drawCall(call, limit)));
}

/** Draw messages one below the other. Only a reply, which ends a turn, has forced text. */
export function drawMessages(messages, options) {
  return h("div", { class: "messages" }, messages.map((message) => drawMessage(message, message.turn === undefined ? { ...options, forced: [] } : options)));
}

/** Return the whole text of messages, for comparisons. */
export function messagesText(messages) {
  return messages.map((message) => {
    const calls = (message.tool_calls ?? []).map((call) => `${call.name}(${argumentsText(call)})`);
    const content = typeof message.content === "string" ? message.content : (message.content ?? []).map((part) => part.text ?? "[image]").join("\n");
    return [message.thinking, content, ...calls].filter(Boolean).join("\n");
  }).join("\n\n");
}

function drawContent(content, forced, limit) {
  if (typeof content === "string") return content && drawText(content, forced, limit);
  return (content ?? []).map((part) => (part.type === "image" ? drawImage(part.image) : drawText(part.text ?? "", forced, limit)));
}

/** Draw an image from a data URI; anything else is shown as text, because the page loads nothing from elsewhere. */
export function drawImage(source) {
  if (!/^data:image\/(png|jpeg|gif|webp|bmp|svg\+xml)[;,]/.test(source ?? "")) return h("p", { class: "muted" }, "image: ", textLine(source, 80));
  return h("img", { class: "picture", src: source, alt: "image in the conversation", loading: "lazy" });
}

function drawText(text, forced, limit) {
  const first = forced.find((piece) => piece.trim() && text.includes(piece));
  if (first === undefined || text.length > 50_000) return textBlock(text, "prose", limit);
  const block = h("div", { class: "text prose", dir: "auto" });
  text.split(first).forEach((part, index) => {
    if (index) block.append(h("mark", { class: "forced", title: "forced: not sampled by the model" }, markInvisible(first)));
    block.append(markInvisible(part));
  });
  return block;
}

function argumentsText(call) {
  return typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments, null, 2);
}

function drawCall(call, limit) {
  return h("div", { class: "call" }, h("header", null, h("span", { class: "role" }, "call"), h("b", { class: "mono" }, textLine(call.name, 80)), call.id && h("span", { class: "muted mono" }, textLine(call.id, 40))),
    textBlock(argumentsText(call), "code", limit));
}
