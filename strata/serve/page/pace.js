// Drawing at a pace that leaves the page most of its time, however long what is drawn has become.

const REST = 3; // times as long as the last drawing took, nothing is drawn

export class Pace {
  constructor(draw) {
    this.draw = draw;
    this.next = null;
    this.rest = 0;
  }

  /** Something has changed: it is drawn soon, together with what changes until then. */
  changed() {
    if (this.next !== null) return;
    this.next = setTimeout(() => (this.next = requestAnimationFrame(() => this.now())), this.rest);
  }

  now() {
    const began = performance.now();
    this.next = null;
    this.draw();
    this.rest = REST * (performance.now() - began);
  }
}
