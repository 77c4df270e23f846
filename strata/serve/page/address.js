// The address of each conversation: its name behind the "#", so that back and forward lead from one to the other.

const NAME = /^#([0-9a-f]{24})$/;

/** The id that the address has; null for that of a new conversation. */
export function idInAddress() {
  return NAME.exec(location.hash)?.[1] ?? null;
}

/** Whether this place in the browser's history was shown before: then an address without an id is that of a new conversation. */
export function wasShown() {
  return history.state !== null;
}

/** Write the id, null for none, into the address. replace: in place of what stands there, instead of behind it. */
export function writeAddress(id, replace) {
  const address = location.pathname + location.search + (id === null ? "" : `#${id}`);
  if (replace || id === idInAddress()) history.replaceState({}, "", address);
  else history.pushState({}, "", address);
}
