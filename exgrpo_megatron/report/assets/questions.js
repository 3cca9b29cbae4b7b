// The table of questions: filtered and sorted as a whole, drawn a page at a time.

const PAGE = 50;
const COLUMNS = [
  ["text", "Question", false], ["category", "Category", false], ["status", "Status", false], ["last", "Latest k", true],
  ["rate", "Pass rate", true], ["groups", "Groups", true], ["last_step", "Last tried", true], ["stored", "Stored", true],
  ["replays", "Replays", true], ["ratio", "Latest w", true], ["evicted", "Evicted", true], ["retired_step", "Retired at", true],
];

class QuestionTable {
  constructor(data) {
    this.data = data;
    this.columns = data.questions;
    const { id, text, answer } = this.columns;
    this.haystack = id.map((name, i) => `${name}\n${text[i]}\n${answer[i]}`.toLowerCase());
    this.shownColumns = COLUMNS.filter(([name]) => name === "text" || this.columns[name].some((value) => value !== null && value !== "" && value !== 0) || name === "status");
    this.rows = [];
    this.page = 0;
    this.sortBy = null;
    this.descending = false;
    this.fillFilters();
    this.drawHead();
    const form = document.getElementById("question-filters");
    form.addEventListener("input", () => this.filter());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => this.filter()));
    this.filter();
  }

  fillFilters() {
    const fill = (name, entries) => {
      const select = document.getElementById(name);
      select.replaceChildren(el("option", { value: "" }, "all"), ...entries.map(([value, label]) => el("option", { value }, label)));
      select.closest("label").hidden = entries.length === 0;
    };
    const counts = new Map();
    for (const status of this.columns.status) counts.set(status, (counts.get(status) || 0) + 1);
    fill("filter-status", this.data.statuses.map((name, i) => [i, `${name} (${(counts.get(i) || 0).toLocaleString("en")})`]).filter(([i]) => counts.has(i)));
    const lasts = [...new Set(this.columns.last.filter((value) => value !== null))].sort((a, b) => a - b);
    fill("filter-last", lasts.map((value) => [value, `${value} of ${this.data.run.group_size}`]));
    const collator = new Intl.Collator("en", { numeric: true });
    fill("filter-category", [...new Set(this.columns.category)].filter((name) => name !== "").sort(collator.compare).map((name) => [name, name]));
    this.collator = collator;
  }

  drawHead() {
    const head = el("tr", {});
    for (const [name, label, numeric] of this.shownColumns) {
      const cell = el("th", { scope: "col", class: numeric ? "num" : "" }, el("button", { type: "button", onclick: () => this.sort(name) }, label));
      cell.dataset.column = name;
      head.append(cell);
    }
    document.querySelector("#question-table thead").replaceChildren(head);
  }

  filter() {
    const value = (name) => document.getElementById(name).value;
    const words = value("search").toLowerCase().split(/\s+/).filter(Boolean);
    const status = value("filter-status"), last = value("filter-last"), category = value("filter-category");
    const c = this.columns, found = [];
    for (let i = 0; i < c.id.length; i++) {
      if (status !== "" && c.status[i] !== Number(status)) continue;
      if (last !== "" && c.last[i] !== Number(last)) continue;
      if (category !== "" && c.category[i] !== category) continue;
      if (!words.every((word) => this.haystack[i].includes(word))) continue;
      found.push(i);
    }
    this.rows = found;
    this.order();
    this.show(0);
  }

  sort(name) {
    this.descending = this.sortBy === name ? !this.descending : COLUMNS.find(([column]) => column === name)[2];
    this.sortBy = name;
    this.order();
    this.show(0);
  }

  order() {
    for (const cell of document.querySelectorAll("#question-table th")) {
      if (cell.dataset.column === this.sortBy) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    if (this.sortBy === null) return;
    const values = this.sortBy === "text" ? this.columns.id.map((id, i) => this.columns.text[i] || id) : this.columns[this.sortBy];
    const sign = this.descending ? -1 : 1, text = typeof values.find((value) => value !== null) === "string";
    const compare = text ? this.collator.compare : (a, b) => a - b;
    // What is not there comes last either way; equals stay in the order of the data.
    this.rows.sort((a, b) => {
      const x = values[a], y = values[b];
      if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;
      return sign * compare(x, y) || a - b;
    });
  }

  show(page) {
    const pages = Math.max(1, Math.ceil(this.rows.length / PAGE));
    this.page = Math.min(Math.max(0, page), pages - 1);
    const rows = this.rows.slice(this.page * PAGE, (this.page + 1) * PAGE);
    document.querySelector("#question-table tbody").replaceChildren(...rows.map((i) => this.row(i)));
    const all = this.columns.id.length.toLocaleString("en"), found = this.rows.length.toLocaleString("en");
    document.getElementById("question-count").textContent = this.rows.length === this.columns.id.length ? `${all} questions` : `${found} of ${all} questions`;
    const button = (label, target, off) => el("button", { type: "button", disabled: off, onclick: () => this.show(target) }, label);
    document.getElementById("pager").replaceChildren(
      button("First", 0, this.page === 0), button("Previous", this.page - 1, this.page === 0),
      el("span", {}, `page ${(this.page + 1).toLocaleString("en")} of ${pages.toLocaleString("en")}`),
      button("Next", this.page + 1, this.page === pages - 1), button("Last", pages - 1, this.page === pages - 1));
  }

  row(i) {
    return el("tr", {}, ...this.shownColumns.map(([name, , numeric]) => this.cell(name, i, numeric)));
  }

  cell(name, i, numeric) {
    const c = this.columns, value = c[name][i];
    if (name === "text") return el("td", { class: "text" }, el("button", { type: "button", onclick: () => this.open(i) }, value || c.id[i]));
    if (name === "status") return el("td", {}, el("span", { class: `status s${value}` }, this.data.statuses[value]));
    if (value === null || value === "") return el("td", { class: numeric ? "num muted" : "muted" }, "–");
    const text = name === "rate" ? percent(value) : name === "last" ? `${value}/${this.data.run.group_size}` : numeric ? number(value) : value;
    return el("td", { class: numeric ? "num" : "" }, text);
  }

  open(i) {
    const dialog = document.getElementById("question");
    document.getElementById("question-body").replaceChildren(...this.detail(i, () => dialog.close()));
    dialog.showModal();
    history.replaceState(null, "", `#question-${i}`);
    dialog.addEventListener("close", () => history.replaceState(null, "", "#questions"), { once: true });
  }

  detail(i, close) {
    const c = this.columns, events = this.data.events[i] || [], parts = [];
    const status = el("span", { class: `status s${c.status[i]}` }, this.data.statuses[c.status[i]]);
    parts.push(el("div", { class: "head" }, el("h2", { id: "question-id" }, c.id[i]), el("button", { type: "button", onclick: close }, "Close")));
    const facts = [c.category[i] && `category ${c.category[i]}`, c.rate[i] !== null && `pass rate ${percent(c.rate[i])} over ${c.groups[i]} groups`, `${c.stored[i]} answers stored`].filter(Boolean);
    parts.push(el("p", {}, status, el("span", { class: "muted" }, `  ${facts.join(" · ")}`)));
    if (c.text[i]) parts.push(el("h3", {}, "Question"), el("div", { class: "prose" }, c.text[i]));
    if (c.answer[i]) parts.push(el("h3", {}, "Gold answer"), el("div", { class: "prose" }, c.answer[i]));
    if (!events.length) {
      parts.push(el("p", { class: "muted" }, "No history: it was not tried yet, or this run wrote none."));
      return parts;
    }
    parts.push(this.timeline(events), el("h3", {}, "History"), this.eventTable(events), ...this.texts(events));
    return parts;
  }

  /** Correct of K over the steps in which the question was tried; replayed groups apart. */
  timeline(events) {
    const kind = (name) => this.data.kinds.indexOf(name);
    const replayed = new Set(events.filter((event) => event[1] === kind("replayed")).map((event) => event[0]));
    const tried = events.filter((event) => event[1] === kind("tried"));
    const part = (chosen, name, color) => ({ name, color, steps: chosen.map((event) => event[0]), values: chosen.map((event) => event[2]), dots: true, dotsOnly: false });
    const all = { ...part(tried, "", "var(--grey)"), thin: true, dots: false };
    const [fresh, again] = [tried.filter((event) => !replayed.has(event[0])), tried.filter((event) => replayed.has(event[0]))];
    const markers = [[fresh, "new", "var(--blue)"], [again, "replayed", "var(--orange)"]].filter(([chosen]) => chosen.length)
      .map(([chosen, name, color]) => ({ ...part(chosen, name, color), hidden: true }));
    const chart = lineChart({ title: "Correct answers of its groups", unit: `of K = ${this.data.run.group_size}`, y: [0, this.data.run.group_size], whole: true, width: 900, height: 190,
      series: [all, ...markers.map((one) => ({ ...one, dots: true, dotsOnly: true }))] });
    for (const circle of chart.querySelectorAll("circle")) circle.setAttribute("r", 4);
    return chart;
  }

  eventTable(events) {
    const rows = events.map(([step, kind, ...values]) => el("tr", {}, el("td", { class: "num" }, String(step)), el("td", {}, this.data.kinds[kind].replace("_", " ")), el("td", {}, this.words(this.data.kinds[kind], values))));
    const head = el("thead", {}, el("tr", {}, ...["Step", "Event", "What"].map((name) => el("th", { scope: "col", class: name === "Step" ? "num" : "" }, el("button", { type: "button", disabled: true }, name)))));
    return el("div", { class: "scroll" }, el("table", { class: "data" }, head, el("tbody", {}, ...rows)));
  }

  words(kind, values) {
    switch (kind) {
      case "tried": return `${values[0]} of ${values[1]} correct`;
      case "stored": return `answer ${values[0]}`;
      case "replayed": return `answer ${values[0]}: mean w ${number(values[1])}, largest ${number(values[2])}`;
      case "evicted": return `answer ${values[0]}: ${values[1]}`;
      case "left_out": return `${values[0]} correct answers not stored: ${values[1]}`;
      case "prefilled": case "lost": return `${values[0]} answers`;
      case "retired": return "solved by every answer: its stored answers are forgotten";
      case "returned": return "no longer retired";
      default: return values.map(String).join(", ");
    }
  }

  texts(events) {
    const kind = this.data.kinds.indexOf("replayed"), replays = new Map();
    for (const event of events) if (event[1] === kind) replays.set(event[2], [...(replays.get(event[2]) || []), event]);
    if (!replays.size) return [];
    return [el("h3", {}, "Replayed answers"), ...[...replays].flatMap(([serial, list]) => {
      const found = this.data.answers[serial];
      const when = list.map((event) => event[0]).join(", ");
      const title = `Answer ${serial}, replayed in step ${when}` + (found ? `; stored in step ${found[2]}, ${found[1]} tokens, mean log-prob ${number(found[3])}` : "");
      return [el("p", { class: "muted" }, title), found ? el("div", { class: "prose answer", tabindex: 0 }, found[0]) : el("p", { class: "muted" }, "Its text is in no checkpoint that is left.")];
    })];
  }
}
