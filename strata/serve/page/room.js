// How much of a conversation a model can read at once. What does not fit is no longer sent; it stays on the page.

const SHARE = 0.25; // of what a model takes, kept for the answer where the reader sets no bound
const KEPT = 0.5; // how much is left once something has to go, so that it need not go at every question

/** Tokens that an answer is to have room for. */
export function answerRoom(limit, most) {
  return most ?? Math.floor(limit * SHARE);
}

/**
 * Move `conversation.start`, the first message that is sent, if what is to be sent would leave too little room.
 * limit: tokens that the model takes, question and answer together. most: of an answer, if the reader has set it.
 * True if it was moved. Without a reply so far nothing is known of how many tokens a text has, and all is sent.
 */
export function makeRoom(conversation, limit, most) {
  const perCharacter = tokensPerCharacter(conversation);
  const room = answerRoom(limit, most);
  if (perCharacter === null || room > limit / 2) return false;
  const tokens = () => perCharacter * length(conversation);
  if (tokens() + room <= limit) return false;
  let moved = false;
  while (tokens() > limit * KEPT && forgetTurn(conversation)) moved = true;
  return moved;
}

/** Leave out the older half of the turns that are sent. False if there is one alone. */
export function forgetHalf(conversation) {
  const turns = sent(conversation).filter(({ role }) => role === "user").length;
  let moved = false;
  for (let left = Math.ceil((turns - 1) / 2); left > 0 && forgetTurn(conversation); left -= 1) moved = true;
  return moved;
}

/** The messages that are sent: those from `conversation.start` on. */
export function sent(conversation) {
  return conversation.messages.slice(conversation.start ?? 0);
}

/** Go on to the next message of the reader's; false if there is none. */
function forgetTurn(conversation) {
  const from = (conversation.start ?? 0) + 1;
  const next = conversation.messages.findIndex(({ role }, at) => at >= from && role === "user");
  if (next < 0) return false;
  conversation.start = next;
  return true;
}

function length(conversation) {
  return sent(conversation).reduce((sum, { content }) => sum + content.length, conversation.system.length);
}

/** By the newest reply of which it is known how many tokens it had, together with what was sent for it. */
function tokensPerCharacter(conversation) {
  const known = conversation.messages.findLast(({ stats }) => stats?.tokensPerCharacter);
  return known ? known.stats.tokensPerCharacter : null;
}
