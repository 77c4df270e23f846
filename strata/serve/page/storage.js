// What the browser keeps of the pages. Some browsers keep nothing, or have no room: the pages work all the same.

const LASTING = () => localStorage; // where nothing may be kept, its mere name is an error
export const OF_TAB = () => sessionStorage;

/** False if the browser has no room or keeps nothing. */
export function keep(name, value, storage = LASTING) {
  try {
    storage().setItem(name, value);
    return true;
  } catch {
    return false;
  }
}

export function kept(name, storage = LASTING) {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

export function drop(name, storage = LASTING) {
  try {
    storage().removeItem(name);
  } catch {
    // a browser that keeps nothing has nothing to forget
  }
}

/** Names of all that is kept; null if this browser keeps nothing. */
export function keptNames() {
  try {
    return Object.keys(localStorage);
  } catch {
    return null;
  }
}
