"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const run = facts.run, lanes = facts.lanes;
const by = (id) => document.getElementById(id);
const tip = by("tip");

// -- words ------------------------------------------------------------------------------------------

function bytes(n) {
  if (n === null || n === undefined) return "-";
  for (const [size, word] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (n >= size) return `${digits(n / size)} ${word}`;
  }
  return `${n} B`;
}

function digits(x, count = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "-";
  if (x !== 0 && (Math.abs(x) >= 10 ** 6 || Math.abs(x) < 10 ** -4)) return x.toExponential(count - 1);
  return Number(x.toPrecision(count)).toLocaleString("en-US", {maximumFractionDigits: 6});
}

function fixed(x) {
  return typeof x === "number" ? x.toFixed(4) : "-";
}

function seconds(s) {
  if (s === null || s === undefined) return "-";
  return s >= 1 ? `${digits(s)} s` : `${digits(s * 1000)} ms`;
}

function make(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function table(head, rows) {
  const top = make("tr", {}, ...head.map((each) => make("th", {scope: "col"}, each)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))));
  return make("div", {class: "wide"}, make("table", {}, make("thead", {}, top), make("tbody", {}, ...body)));
}

function say(text, x, y) {
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.min(x + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(y + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

// -- in short ---------------------------------------------------------------------------------------

function summary() {
  by("about").textContent = [
    `${digits(run.parameters / 1e6, 4)} M parameters, ${run.start}`, run.data, `on ${run.device}`,
    ...(run.ranks > 1 ? [`${run.ranks} ranks; memory and links are those of the first`] : []),
  ].join(" · ");
  const tiles = [
    ["loss", `${fixed(run.loss_first)} → ${fixed(run.loss_last)}`, `in ${run.steps.length} steps`],
    ["step", seconds(run.step_s), run.step_over_bound ? `${digits(run.step_over_bound)} times the lower bound` : ""],
    ["bound", seconds(run.bound_s), ""],
    ["stalls", stalls(), ""],
    ["tokens", `${digits(run.tokens_s)} tokens/s`, `${digits(run.steps.at(-1)?.tokens, 12)} a step`],
    ["cpu", `${digits(run.cpu_s)} core-seconds`, ""],
    ["process", bytes(run.peak_rss_bytes), ""],
    ["training", bytes(run.training_bytes), ""],
  ];
  if (run.comparison) {
    tiles.push(
      ["in_memory", `${seconds(run.comparison.step_s)} a step`,
        `offloaded: ${digits(run.step_s / run.comparison.step_s)} times`],
      ["loss_difference", digits(run.comparison.loss_difference, 2), ""]);
  }
  for (const [id, figure, words] of tiles) {
    const {name, meaning} = facts.figures[id];
    const head = make("abbr", {title: meaning, tabindex: 0}, name);
    by("summary").append(make("div", {class: "tile", "data-figure": id}, head, make("b", {}, figure), make("span", {}, words)));
  }
  explain(by("summary"));
}

// Shows the meaning of a figure with the pointer over its name, and with the keyboard on it.
function explain(place) {
  for (const head of place.querySelectorAll("abbr")) {
    const meaning = head.getAttribute("title");
    head.removeAttribute("title");
    head.setAttribute("aria-label", `${head.textContent}: ${meaning}`);
    head.addEventListener("pointermove", (event) => say(meaning, event.clientX, event.clientY));
    head.addEventListener("focus", () => {
      const box = head.getBoundingClientRect();
      say(meaning, box.left, box.bottom);
    });
    for (const end of ["pointerleave", "blur"]) head.addEventListener(end, () => say("", 0, 0));
  }
}

// The median stall of a step in seconds, all lanes together.
function stalls() {
  const found = run.steps.slice(run.steps.length > 1 ? 1 : 0).filter((step) => step.lanes)
    .map((step) => Object.values(step.lanes).reduce((sum, lane) => sum + lane.stall_s, 0));
  found.sort((one, other) => one - other);
  return found.length ? seconds(found[Math.floor(found.length / 2)]) : "-";
}

// -- loss -------------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

function loss() {
  const curves = [["offloaded", run.steps, "#4477aa", "", 5]];
  if (run.comparison) curves.push(["in plain PyTorch", run.comparison.steps, "#ffb000", "7 7", 2]);
  const wide = 1100, high = 320, left = 56, below = 28;
  const values = curves.flatMap(([, steps]) => steps.map((step) => step.loss)).filter(Number.isFinite);
  if (!values.length) {
    by("loss").append(make("p", {}, "No step has a loss."));
    return;
  }
  const low = Math.min(...values), top = Math.max(...values), span = top - low || 1;
  const first = run.steps[0].step, last = run.steps.at(-1).step;
  const x = (step) => left + (wide - left - 12) * (step - first) / Math.max(1, last - first);
  const y = (value) => 10 + (high - below - 20) * (top - value) / span;
  const svg = drawn("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", tabindex: 0,
    "aria-label": `Loss from ${fixed(run.loss_first)} to ${fixed(run.loss_last)}`});
  for (const value of ticks(low, top, 5)) {
    svg.append(drawn("line", {class: "axis", x1: left, x2: wide - 12, y1: y(value), y2: y(value)}));
    svg.append(drawn("text", {x: left - 8, y: y(value) + 4, "text-anchor": "end"}, digits(value)));
  }
  for (const step of ticks(first, last, 8).filter(Number.isInteger)) {
    svg.append(drawn("text", {x: x(step), y: high - 8, "text-anchor": "middle"}, step));
  }
  for (const [, steps, colour, dash, thick] of curves) {
    const points = steps.filter((step) => Number.isFinite(step.loss)).map((step) => `${x(step.step)},${y(step.loss)}`);
    svg.append(drawn("polyline", {points: points.join(" "), fill: "none", stroke: colour, "stroke-width": thick,
      "stroke-dasharray": dash}));
    if (points.length === 1) svg.append(drawn("circle", {cx: x(first), cy: y(steps[0].loss), r: 4, fill: colour}));
  }
  const cross = drawn("line", {stroke: "currentColor", y1: 10, y2: high - below, visibility: "hidden"});
  svg.append(cross);
  let at = run.steps.length - 1;
  function show(number, left_px, top_px) {
    at = Math.max(0, Math.min(run.steps.length - 1, number));
    const step = run.steps[at].step;
    cross.setAttribute("x1", x(step));
    cross.setAttribute("x2", x(step));
    cross.setAttribute("visibility", "visible");
    const told = curves.map(([name, steps]) => `${name} ${steps[at] ? digits(steps[at].loss, 5) : "-"}`);
    say(`step ${step}: ${told.join(", ")}`, left_px, top_px);
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * wide - left) / (wide - left - 12);
    show(Math.round(share * (run.steps.length - 1)), event.clientX, event.clientY);
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); say("", 0, 0); });
  svg.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    show(at + move, box.left + 80, box.top + 20);
  });
  by("loss").append(svg, make("p", {}, ...curves.map(([name, , colour]) => key(name, colour))));
}

function key(name, colour) {
  return make("span", {class: "key"}, make("i", {style: `background:${colour}`}), name);
}

// -- lanes ------------------------------------------------------------------------------------------

const ROW = 34, HEAD = 22, NAMES = 130;

// One picture of lanes: spans are [lane, name, began, ended, bytes], in microseconds.
function timeline(title, data, view) {
  const rows = [...lanes.order, "stalls"];
  const canvas = make("canvas", {tabindex: 0, role: "img",
    "aria-label": `${title}: ${lanes.order.map((lane) => lanes.words[lane]).join(", ")}, and what compute waited for`});
  const height = HEAD + ROW * rows.length + 20;
  canvas.style.height = `${height}px`;
  const place = (time) => NAMES + (canvas.clientWidth - NAMES) * (time - view.from) / (view.to - view.from);

  function draw() {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.max(1, canvas.clientWidth * ratio);
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
    pen.scale(ratio, ratio);
    pen.font = "13px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const edge = (time) => Math.round(place(time) * ratio) / ratio;  // else what is thin is pale
    const ink = style.color, faint = style.getPropertyValue("--faint"), line = style.getPropertyValue("--line");
    pen.save();
    pen.beginPath();
    pen.rect(NAMES, 0, canvas.clientWidth - NAMES, height);
    pen.clip();
    for (const [spans, row_of] of [[data.spans, (span) => rows.indexOf(span[0])], [data.stalls, () => rows.length - 1]]) {
      for (const span of spans) {
        if (span[3] < view.from || span[2] > view.to) continue;
        pen.fillStyle = lanes.colours[span[0]];
        const began = edge(span[2]);
        pen.fillRect(began, HEAD + ROW * row_of(span) + 4, Math.max(1, edge(span[3]) - began), ROW - 8);
      }
    }
    pen.fillStyle = faint;
    pen.textAlign = "center";
    for (const [number, began, ended] of data.steps) {
      pen.fillStyle = line;
      pen.fillRect(place(ended), 0, 1, height - 20);
      pen.fillStyle = faint;
      const from = Math.max(began, view.from), to = Math.min(ended, view.to);
      if (to > from) pen.fillText(`step ${number}`, (place(from) + place(to)) / 2, HEAD / 2);
    }
    pen.restore();
    for (const time of ticks(view.from, view.to, Math.max(2, Math.min(8, (canvas.clientWidth - NAMES) / 80)))) {
      const at = place(time);
      pen.fillStyle = faint;
      pen.textAlign = at < NAMES + 30 ? "left" : at > canvas.clientWidth - 30 ? "right" : "center";
      pen.fillText(time ? seconds(time / 1e6) : "0", at, height - 8);
    }
    pen.textAlign = "left";
    pen.fillStyle = ink;
    rows.forEach((lane, row) => pen.fillText(lanes.words[lane] || "stalls", 0, HEAD + ROW * (row + 0.5)));
    canvas.dataset.drawn = data.spans.length;
  }

  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const time = view.from + (view.to - view.from) * (event.clientX - box.left - NAMES) / (box.width - NAMES);
    const row = Math.floor((event.clientY - box.top - HEAD) / ROW);
    const among = row === rows.length - 1 ? data.stalls : data.spans.filter((span) => span[0] === rows[row]);
    const near = 2 * (view.to - view.from) / box.width;
    const found = among.find((span) => span[2] - near <= time && time <= span[3] + near);
    if (!found || event.clientX - box.left < NAMES) return say("", 0, 0);
    const took = (found[3] - found[2]) / 1e6;
    const moved = found[4] ? `, ${bytes(found[4])}, ${digits(found[4] / took / 1e9)} GB/s` : "";
    say(`${lanes.words[found[0]]}: ${found[1]}, ${seconds(took)}${moved}`, event.clientX, event.clientY);
  }

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return hover(event);
    view.move((held - event.clientX) / (canvas.clientWidth - NAMES));
    held = event.clientX;
  });
  canvas.addEventListener("pointerleave", () => say("", 0, 0));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    view.zoom(event.deltaY < 0 ? 0.8 : 1.25, (event.clientX - box.left - NAMES) / (box.width - NAMES));
  }, {passive: false});
  canvas.addEventListener("keydown", (event) => {
    const act = {
      "+": () => view.zoom(0.7, 0.5), "=": () => view.zoom(0.7, 0.5), "-": () => view.zoom(1.4, 0.5),
      ArrowLeft: () => view.move(-0.1), ArrowRight: () => view.move(0.1), "0": () => view.reset(),
    }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
  return {canvas, draw};
}

function pictures() {
  const names = ["measured", ...(lanes.planned ? ["planned"] : [])];
  const end = Math.max(...names.map((name) => lanes[name].end));
  const view = {
    from: 0, to: end, drawers: [],
    changed() { for (const draw of this.drawers) draw(); },
    set(from, to) {
      const width = Math.min(end, Math.max(end / 5000, to - from));
      this.from = Math.max(0, Math.min(end - width, from));
      this.to = this.from + width;
      this.changed();
    },
    zoom(by, share) {
      const at = this.from + (this.to - this.from) * Math.max(0, Math.min(1, share));
      this.set(at - (at - this.from) * by, at + (this.to - at) * by);
    },
    move(share) {
      const by = (this.to - this.from) * share;
      this.set(this.from + by, this.to + by);
    },
    reset() { this.set(0, end); },
  };
  const tools = make("div", {class: "tools", role: "group", "aria-label": "Zoom of the lanes"});
  for (const [word, act] of [["zoom in", () => view.zoom(0.7, 0.5)], ["zoom out", () => view.zoom(1.4, 0.5)],
    ["earlier", () => view.move(-0.3)], ["later", () => view.move(0.3)], ["all", () => view.reset()]]) {
    const button = make("button", {type: "button"}, word);
    button.addEventListener("click", act);
    tools.append(button);
  }
  by("lanes").append(tools);
  for (const name of names) {
    const {canvas, draw} = timeline(name, lanes[name], view);
    by("lanes").append(make("h3", {}, name), canvas);
    view.drawers.push(draw);
  }
  addEventListener("resize", () => view.changed());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.changed());
  view.changed();
}

// -- memory -----------------------------------------------------------------------------------------

function memory() {
  const measured = lanes.measured, wide = 1100, high = 200, left = 76;
  for (const [number, tier] of ["device", "host"].entries()) {
    const stats = run.memory[tier], used = measured.levels.map((level) => level[1 + number]);
    if (!stats || !used.some((n) => n > 0)) continue;
    const near = stats.budget_bytes <= 4 * Math.max(stats.peak_bytes, ...used);
    const top = 1.08 * Math.max(...used, stats.peak_bytes, near ? stats.budget_bytes : 0);
    const x = (time) => left + (wide - left - 12) * time / measured.end;
    const y = (n) => 8 + (high - 32) * (1 - n / top);
    const svg = drawn("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label":
      `${tier} memory in use: at most ${bytes(stats.peak_bytes)} of ${bytes(stats.budget_bytes)}`});
    const unit = [2 ** 30, 2 ** 20, 2 ** 10].find((size) => top >= size) || 1;
    for (const n of ticks(0, top / unit, 4).map((count) => count * unit)) {
      svg.append(drawn("line", {class: "axis", x1: left, x2: wide - 12, y1: y(n), y2: y(n)}));
      svg.append(drawn("text", {x: left - 8, y: y(n) + 4, "text-anchor": "end"}, bytes(Math.round(n))));
    }
    const area = (of, colour) => {
      const path = [`M${x(0)},${y(0)}`];
      measured.levels.forEach((level, at) => {
        const until = at + 1 < measured.levels.length ? measured.levels[at + 1][0] : measured.end;
        path.push(`L${x(level[0])},${y(of(level))}L${x(until)},${y(of(level))}`);
      });
      svg.append(drawn("path", {d: `${path.join("")}L${x(measured.end)},${y(0)}Z`, fill: colour, opacity: 0.75}));
    };
    area((level) => level[1 + number], lanes.tiers[tier]);
    const saved = number === (used.length && run.memory.device ? 0 : 1) && measured.levels.some((level) => level[3]);
    if (saved) area((level) => level[3], "#ccbb44");
    if (near) {
      svg.append(drawn("line", {x1: left, x2: wide - 12, y1: y(stats.budget_bytes), y2: y(stats.budget_bytes),
        stroke: "#cc3311", "stroke-width": 2, "stroke-dasharray": "7 5"}));
    }
    const words = [key("in use", lanes.tiers[tier]), ...(saved ? [key("of that, activations", "#ccbb44")] : []),
      key(`budget, ${bytes(stats.budget_bytes)}${near ? "" : " (not drawn)"}`, "#cc3311")];
    by("memory").append(make("h3", {}, `${tier} memory: peak ${bytes(stats.peak_bytes)} of ${bytes(stats.budget_bytes)}`), svg, make("p", {}, ...words));
  }
  const disk = run.memory.nvme;
  if (disk) {
    by("memory").append(make("p", {}, `on disk: ${bytes(disk.peak_bytes)} of ${bytes(disk.budget_bytes)}`));
  }
}

// -- plan, next, steps ------------------------------------------------------------------------------

function plan() {
  const rows = [["step time", seconds(run.plan.step_s), seconds(run.step_s)]];
  for (const [lane, words] of Object.entries(lanes.links)) {
    const planned = run.plan.link_bytes[lane] || 0, moved = run.link_bytes_per_step[lane] || 0;
    if (planned || moved) rows.push([words, bytes(planned), bytes(moved)]);
  }
  for (const [tier, stats] of Object.entries(run.memory)) {
    rows.push([`${tier} memory`, bytes(run.plan.tier_bytes[tier] || 0), bytes(stats.peak_bytes)]);
  }
  by("plan").append(table(["", "planned", "measured"], rows));
  by("plan").append(make("p", {class: "hint"},
    "The plan is simulated, with the compute that was measured and every other lane at its rate."));
}

function next() {
  const found = run.next && run.next.step_s ? Object.entries(run.next.with) : [];
  if (!found.length) {
    by("next").append(make("p", {}, "Other choices cannot be simulated: the rates of this machine or the time of compute are unknown."));
    return;
  }
  const rows = found.map(([change, step_s]) => {
    const share = step_s / run.next.step_s / (change === lanes.more_tokens ? 2 : 1) - 1;
    const words = Math.abs(share) < 0.01 ? "as now" : `${digits(Math.abs(share) * 100, 2)} % ${share < 0 ? "less" : "more"}`;
    const cell = make("span", Math.abs(share) < 0.01 ? {} : {class: share < 0 ? "good" : "bad"}, words);
    return [share, [change, seconds(step_s), cell]];
  });
  rows.sort((one, other) => one[0] - other[0]);
  if (rows[0][0] > -0.01) {
    by("next").append(make("p", {}, "None of these reduces the time per token."));
  }
  by("next").append(table(["change", "predicted step time", "time per token"], rows.map(([, row]) => row)));
  by("next").append(make("p", {class: "hint"},
    `Simulated, with the compute that was measured. For this run the simulator predicts ${seconds(run.next.step_s)} a step.`));
}

function steps() {
  const other = run.comparison ? run.comparison.steps : [];
  const head = ["step", "loss", ...(run.comparison ? ["loss in plain PyTorch"] : []), "step time", "lower bound", "core-seconds"];
  by("steps").append(table(head, run.steps.map((step, at) => [
    String(step.step), digits(step.loss, 6), ...(run.comparison ? [other[at] ? digits(other[at].loss, 6) : "-"] : []),
    seconds(step.wall_s), seconds(step.bound_s), digits(step.cpu_s),
  ])));
}

for (const part of [summary, loss, pictures, memory, plan, next, steps]) part();
document.body.dataset.ready = "yes";
