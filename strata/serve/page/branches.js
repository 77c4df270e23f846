// The ways a conversation went: where a message was edited or answered again, the others are kept beside it.
//
// A message with others in its place has `fork`: {at, tails}. tails are what was said from that place on, one list of messages
// for each way; the one that is shown, number `at`, stands in the conversation itself and is null here.

/**
 * Put aside what was said from `at` on. Returns the fork that the message which is said next must have, undefined if it has
 * none beside it: nothing is kept of a question that never got an answer.
 */
export function branch(conversation, at) {
  const tail = takeTail(conversation, at);
  const fork = tail[0].fork ?? { at: 0, tails: [null] };
  delete tail[0].fork;
  if (hasAnswer(tail)) {
    fork.tails[fork.at] = tail;
    fork.at = fork.tails.push(null) - 1;
  }
  return fork.tails.length > 1 ? fork : undefined;
}

function hasAnswer(messages) {
  return messages.some(
    ({ role, content, reasoning, fork }) =>
      (role === "assistant" && (content || reasoning)) || fork?.tails.some((tail) => tail && hasAnswer(tail)),
  );
}

/** Show the way number `which` from the message at `at` on. */
export function takeBranch(conversation, at, which) {
  const tail = takeTail(conversation, at);
  const { fork } = tail[0];
  delete tail[0].fork;
  fork.tails[fork.at] = tail;
  fork.at = which;
  const chosen = fork.tails[which];
  fork.tails[which] = null;
  chosen[0].fork = fork;
  conversation.messages.push(...chosen);
}

function takeTail(conversation, at) {
  if (conversation.start >= at) delete conversation.start; // what is sent begins with another message then
  return conversation.messages.splice(at);
}
