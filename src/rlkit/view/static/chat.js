/** Draw messages of a conversation: roles, thinking, tool calls and results, images, forced text. */
import { fold, h, joinFacts, plural, textBlock, textLine } from "rlkit/ui";

const ROLES = ["system", "user", "assistant", "tool"];
const MARKED_CHARS = 50_000;
const IMAGE_DATA = /^data:image\/(png|jpeg|gif|webp|bmp|svg\+xml)[;,]/;

/**
 * Draw messages one below the other.
 * replies: by turn, the [text, isForced] runs of its reply if a part was forced; limit: characters shown at first.
 */
export const drawMessages = (messages, { replies = {}, limit } = {}) =>
  h("div.messages", messages.map((message) => drawMessage(message, replies[message.turn], limit)));

function drawMessage(message, runs, limit) {
  const { role, name, branch, thinking, content, tool_calls: calls = [], tool_call_id: callId } = message;
  const drawText = makeTextDrawer(runs, limit);
  const drawPart = (part) => (part.type === "image" ? drawImage(part.image) : drawText(part.text ?? ""));
  const title = thinking && `Thinking · ${plural(thinking.length, "character")}`;
  const kind = `message role-${ROLES.includes(role) ? role : "other"}`;
  return h("article", { class: kind, dataset: { row: "" }, tabIndex: -1 },
    h("header", h("span.role", textLine(role, 40)),
      [name, branch].map((text) => text && h("span.tag", textLine(text, 60))), callId && drawId(callId)),
    thinking && fold(title, drawText(thinking), { kind: "thinking" }),
    typeof content === "string" ? content && drawText(content) : content?.map(drawPart),
    calls.map((call) => h("div.call",
      h("header", h("span.role", "call"), h("b.mono", textLine(call.name, 80)), call.id && drawId(call.id)),
      textBlock(argumentsText(call), "code", limit))));
}

const drawId = (id) => h("span.muted.mono", textLine(id, 40));

/** Return a function that draws texts of a message, in their order, with what was forced of its reply marked. */
function makeTextDrawer(runs = [], limit = undefined) {
  const reply = runs.map(([text]) => text).join("");
  let end = 0;
  return (text) => {
    const start = runs.length > 0 && text.length <= MARKED_CHARS ? reply.indexOf(text, end) : -1;
    if (start < 0) return textBlock(text, "prose", limit);
    end = start + text.length;
    return h("div.text.prose", { dir: "auto" }, cutRuns(runs, start, end).map(([part, isForced]) =>
      isForced ? h("mark.forced", { title: "forced: not sampled by the model" }, part) : part));
  };
}

function cutRuns(runs, start, end) {
  let place = 0;
  return runs.map(([text, isForced]) => {
    const part = text.slice(Math.max(0, start - place), Math.max(0, end - place));
    place += text.length;
    return [part, isForced];
  }).filter(([part]) => part);
}

const argumentsText = (call) =>
  typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments, null, 2);

/** Return the whole text of messages, with their roles if asked for, for comparisons. */
export const messagesText = (messages, hasRoles) => messages.map((message) => {
  const { role, name, thinking, content, tool_calls: calls = [] } = message;
  const text = Array.isArray(content) ? content.map((part) => part.text ?? "[image]").join("\n") : content;
  const lead = hasRoles && `[${joinFacts([role, name], " ")}]`;
  return [lead, thinking, text, ...calls.map((call) => `${call.name}(${argumentsText(call)})`)]
    .filter(Boolean).join("\n");
}).join("\n\n");

/** Draw an image from a data URI; anything else is shown as text, because the page loads nothing from elsewhere. */
export function drawImage(source) {
  if (!IMAGE_DATA.test(source ?? "")) return h("p.muted", "image: ", textLine(source, 80));
  return h("img.picture", { src: source, alt: "image in the conversation", loading: "lazy" });
}
