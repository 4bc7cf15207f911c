// A review: the case that is open, its volumes and numbers, and decisions, which count as saved once the server says so.

const NOTHING = { revision: 0, decision: "", comment: "", reviewer: "", time: "" };
const POLL_MS = 2000;
const TYPING_MS = 1000; // after the last key, a comment is saved
const LOADING_MS = 200; // whoever steps through cases quickly does not load each

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...options.headers, "X-Segcal-Token": DATA.token } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer. Start `segcal review` again; decisions that were saved are kept.");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = { error: text.trim() };
  try {
    told = JSON.parse(text);
  } catch {
    // a sentence as it is
  }
  throw Object.assign(new Error(told.error), { status: answer.status, theirs: told.theirs });
}

class Decisions {
  // `changed` is called with the names of cases whose decisions are new; `trouble` with those that could not be saved.
  constructor(changed) {
    Object.assign(this, { changed, known: new Map(), own: new Map(), troubles: new Map(), revision: 0, line: Promise.resolve(), waiting: 0 });
  }

  of(name) {
    return this.known.get(name) ?? NOTHING;
  }

  take(decision) {
    if (decision.revision <= this.of(decision.case).revision) return false;
    this.known.set(decision.case, decision);
    return true;
  }

  async poll() {
    const { revision, decisions } = await (await ask(`/api/decisions?after=${this.revision}`)).json();
    if (this.waiting) return; // what is being saved here may be among them, and is no news
    this.revision = revision;
    const names = decisions.filter((each) => this.take(each)).map((each) => each.case);
    if (names.length) this.changed(names);
  }

  // One after the other, so that none overtakes another. `seen` is the revision that the change was made from.
  save(name, change, seen, reviewer) {
    this.waiting++;
    this.line = this.line.then(() => this.send(name, change, seen, reviewer)).finally(() => this.waiting--);
    return this.line;
  }

  async send(name, change, seen, reviewer) {
    const now = this.of(name);
    const isOwn = now.revision === this.own.get(name); // the last one was written here, meanwhile
    const { decision, comment } = { ...now, ...change };
    const body = { case: name, decision, comment, reviewer, seen: isOwn ? now.revision : seen };
    const headers = { "Content-Type": "application/json" };
    try {
      const saved = await (await ask("/api/decisions", { method: "PUT", headers, body: JSON.stringify(body), keepalive: true })).json();
      this.own.set(name, saved.revision);
      this.troubles.delete(name);
      this.take(saved);
    } catch (error) {
      if (error.theirs) this.take(error.theirs);
      this.troubles.set(name, { change, reviewer, message: error.message, theirs: error.theirs });
    }
    this.changed([name]);
  }
}

class Review {
  constructor(results) {
    this.results = results;
    this.decisions = new Decisions((names) => this.renew(names));
    this.list = new CaseList((name) => this.decisions.of(name), (name) => this.open(name));
    this.current = null;
    this.seen = 0; // the revision of what is shown of the open case
    this.listen();
  }

  async start() {
    await this.decisions.poll();
    this.showResult(0);
    setInterval(() => document.hidden || this.decisions.poll().catch((error) => this.setState(error.message)), POLL_MS);
  }

  get reviewer() {
    return part("reviewer").value.trim();
  }

  showResult(index) {
    this.index = index;
    this.result = this.results[index];
    this.list.show(this.result);
    const { failures } = this.result;
    part("failures").hidden = !failures.length;
    part("failures").querySelector("ul").replaceChildren(...failures.map(({ case: name, message }) => html("li", { text: `${name}: ${message}` })));
    const kept = this.list.places.has(this.current) ? this.current : null;
    const first = this.result.cases[this.list.order[0]] ?? null;
    this.open(kept ?? (first === null || this.decisions.of(first).decision ? this.list.undecided(first) : first) ?? first);
    this.tellProgress();
  }

  open(name) {
    if (name === null) return;
    this.keepComment();
    this.current = name;
    this.list.choose(name);
    this.showCase();
    this.showVolumes();
  }

  showCase() {
    const { result, current } = this;
    const i = this.list.places.get(current);
    const place = this.list.placeOf(current);
    part("case-title").textContent = current;
    document.title = `${current} · review`;
    part("place").textContent = place < 0 ? "not among the cases shown" : `${place + 1} of ${this.list.order.length}`;
    part("flags").replaceChildren(...result.flags[i][0].map((flag) => html("span", { class: "flag", text: result.flagNames[flag] })));
    const head = html("tr", {}, html("th", { scope: "col", text: "Class" }), ...result.metrics.map(({ heading }) => html("th", { scope: "col", class: "number", text: heading })), html("th", { scope: "col", text: "Flags" }));
    const rows = result.classes.length > 1 ? ["all classes", ...result.classes] : result.classes;
    const body = rows.map((name, c) => {
      const column = rows.length - result.classes.length ? c : c + 1;
      const cells = result.metrics.map(({ name: metric, digits }) => html("td", { class: "number", text: shownNumber(result.values[metric][i][column], digits) }));
      const flags = result.flags[i][column].map((flag) => result.flagNames[flag]).join(", ");
      return html("tr", {}, html("th", { scope: "row", text: name }), ...cells, html("td", { text: flags }));
    });
    part("numbers").tHead.replaceChildren(head);
    part("numbers").tBodies[0].replaceChildren(...body);
    this.showDecision();
  }

  showDecision() {
    const made = this.decisions.of(this.current);
    this.seen = made.revision;
    for (const button of document.querySelectorAll("[data-decision]")) {
      if (button.dataset.decision) button.setAttribute("aria-pressed", button.dataset.decision === made.decision);
      else button.disabled = !made.decision;
    }
    part("comment").value = made.comment;
    const by = made.reviewer ? ` by ${made.reviewer}` : "";
    this.setState(made.time ? `Saved${by}, ${new Date(made.time).toLocaleString()}` : "Not decided yet");
  }

  setState(text) {
    part("saved").textContent = text;
  }

  tellProgress() {
    const made = this.result.cases.map((name) => this.decisions.of(name).decision);
    const [accepted, rejected] = ["accept", "reject"].map((word) => made.filter((each) => each === word).length);
    part("progress").textContent = `${accepted + rejected} of ${made.length} cases decided: ${accepted} accepted, ${rejected} rejected`;
  }

  // Decisions of these cases have changed, here or by others.
  renew(names) {
    if (!this.result) return; // those of an earlier review, before the list is there
    if (names.includes(this.current)) {
      const now = this.decisions.of(this.current);
      const isOwn = this.decisions.own.get(this.current) === now.revision;
      if (this.isTyping && !isOwn && now.revision > this.seen) {
        const change = { comment: part("comment").value };
        this.decisions.troubles.set(this.current, { change, reviewer: this.reviewer, message: "somebody else has decided meanwhile.", theirs: now });
        clearTimeout(this.typing);
        this.typing = null;
      } else if (this.isTyping) this.seen = now.revision;
      if (!this.isTyping) this.showDecision();
    }
    this.list.redraw();
    this.tellProgress();
    this.showTroubles();
  }

  showTroubles() {
    const { troubles } = this.decisions;
    part("troubles").replaceChildren(...[...troubles].map(([name, { change, reviewer, message, theirs }]) => {
      const button = (text, act) => {
        const made = html("button", { type: "button", text });
        made.addEventListener("click", () => {
          troubles.delete(name);
          act();
          this.renew([name]);
        });
        return made;
      };
      const again = () => this.decisions.save(name, change, theirs?.revision ?? this.decisions.of(name).revision, reviewer);
      const mine = Object.values(change).join(" ") || "to take it back";
      const sentence = theirs
        ? `${name}: ${theirs.reviewer || "somebody else"} has decided meanwhile: ${[theirs.decision || "no decision", theirs.comment].filter(Boolean).join(", ")}. You wanted: ${mine}.`
        : `${name} is not saved: ${message}`;
      const choices = theirs ? [button("Keep theirs", () => {}), button("Use mine", again)] : [button("Try again", again), button("Drop", () => {})];
      return html("div", { class: "trouble" }, html("p", { text: sentence }), html("div", { class: "buttons" }, ...choices, button("Show the case", () => (troubles.set(name, { change, reviewer, message, theirs }), this.open(name)))));
    }));
  }

  decide(decision) {
    const name = this.current;
    const next = decision && part("onward").checked ? this.list.undecided(name) : null;
    const change = this.isTyping ? { decision, comment: part("comment").value } : { decision };
    clearTimeout(this.typing);
    this.typing = null;
    this.setState("Saving …");
    this.decisions.save(name, change, this.seen, this.reviewer).then(() => this.followFilters());
    if (next !== null && next !== name) this.open(next);
  }

  // A filter by decision may let go of a case that was decided just now.
  followFilters() {
    if (!this.list.form.elements.decision.value) return;
    this.list.update();
    this.list.mark();
  }

  get isTyping() {
    return Boolean(this.typing);
  }

  keepComment() {
    if (!this.isTyping) return;
    clearTimeout(this.typing);
    this.typing = null;
    this.setState("Saving …");
    this.decisions.save(this.current, { comment: part("comment").value }, this.seen, this.reviewer);
  }

  // That of another case, until the viewer has drawn this one and says so; see review.css.
  hidePicture() {
    const [stage, wait] = ["stage", "wait"].map((name) => part("volumes").querySelector(`[data-part=${name}]`));
    delete stage.dataset.shown;
    [wait.hidden, wait.textContent] = [false, "Loading …"];
  }

  async showVolumes() {
    if (!DATA.volumes) return;
    clearTimeout(this.loading);
    this.fetching?.abort();
    this.fetching = new AbortController();
    const { signal } = this.fetching;
    this.hidePicture();
    await new Promise((done) => (this.loading = setTimeout(done, LOADING_MS)));
    const why = part("no-volumes");
    try {
      const query = new URLSearchParams({ case: this.current, result: this.index });
      const facts = await (await ask(`/api/case?${query}`, { signal })).json();
      const volume = async (kind, method, cls) => {
        const asked = { case: facts.case, result: facts.results[method ?? 0], kind, ...(cls === null ? {} : { class: cls }) };
        return new Uint8Array(await (await ask(`/api/volume?${new URLSearchParams(asked)}`, { signal })).arrayBuffer());
      };
      await loadNiivue();
      if (signal.aborted) return;
      [part("volumes").hidden, why.hidden] = [false, true];
      if (this.viewer) this.viewer.show({ ...facts, volume });
      else this.viewer = mountViewer(part("volumes"), { ...facts, volume });
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      [part("volumes").hidden, why.hidden] = [true, false];
      why.textContent = `Volumes cannot be shown: ${error.message}`;
    }
  }

  listen() {
    part("before").addEventListener("click", () => this.open(this.list.neighbor(this.current, -1)));
    part("after").addEventListener("click", () => this.open(this.list.neighbor(this.current, 1)));
    part("result")?.addEventListener("change", (event) => this.showResult(Number(event.target.value)));
    part("filters").addEventListener("input", () => this.showPlace());
    for (const button of document.querySelectorAll("[data-decision]")) {
      button.addEventListener("click", () => this.decide(button.dataset.decision));
    }
    part("comment").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.setState("Not saved yet");
      this.typing = setTimeout(() => this.keepComment(), TYPING_MS);
    });
    part("comment").addEventListener("change", () => this.keepComment());
    part("comment").addEventListener("keydown", (event) => {
      if (event.key === "Escape" || (event.key === "Enter" && (event.ctrlKey || event.metaKey))) part("comment").blur();
    });
    addEventListener("beforeunload", (event) => {
      this.keepComment();
      if (this.decisions.waiting || this.decisions.troubles.size) event.preventDefault();
    });
    document.addEventListener("keydown", (event) => this.press(event));
  }

  showPlace() {
    const place = this.list.placeOf(this.current);
    part("place").textContent = place < 0 ? "not among the cases shown" : `${place + 1} of ${this.list.order.length}`;
  }

  press(event) {
    const takesText = event.target.closest("input:not([type=checkbox], [type=range]), textarea, select");
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || takesText) return;
    const keys = {
      n: () => part("after").click(),
      j: () => part("after").click(),
      p: () => part("before").click(),
      k: () => part("before").click(),
      a: () => this.decide("accept"),
      r: () => this.decide("reject"),
      u: () => this.decide(""),
      t: () => part("comment").focus(),
      "/": () => part("filters").elements.text.focus(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }
}

// NiiVue's script is large, and needed only where there are volumes. The page's policy knows its hash.
let niivueScript = null;
function loadNiivue() {
  niivueScript ??= (async () => {
    const script = document.createElement("script");
    script.textContent = await (await ask("/api/niivue.js")).text();
    document.head.append(script);
  })();
  return niivueScript;
}

(async () => {
  try {
    const review = new Review(await (await ask("/api/cases")).json());
    await review.start();
  } catch (error) {
    part("troubles").replaceChildren(html("div", { class: "trouble" }, html("p", { text: error.message })));
  }
})();
