"use strict";
// Draws the figure in #payload (pdlab/report/curve_figure.py has what its parts mean), and filters plots and table. Text
// enters the page as text alone (textContent), so that no name in the data can become markup.
(() => {
  const DATA = JSON.parse(document.getElementById("payload").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  const view = { ...DATA.chosen, group: "", log: null };
  const series = DATA.series.map((each, i) => ({ ...each, ...each.style, i, on: true, words: `${each.label} ${each.name} ${each.style.family}`.toLowerCase() }));
  let shown = series, panels = [], pinned = null;

  function make(name, attributes, parent, text) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  function html(name, parent, text, className) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    if (parent) parent.append(node);
    return node;
  }
  const tick = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

  // The axis that is chosen for one side of a panel, and whether it is logarithmic.
  function choose(side) {
    const axis = side.axes[side.by.map((name) => view[name]).join(".")];
    return { ...axis, isLog: axis.free && view.log !== null ? view.log : axis.log.includes(view.group) };
  }
  function linearTicks(low, high, count) {
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find((s) => s * power >= raw) * power;
    const found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(12));
    return found.length > 2 || high <= low || count > 9 ? found : linearTicks(low, high, 2 * count);
  }
  function logTicks(low, high) {
    for (const marks of [[1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
      const found = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
        for (const m of marks) if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(+(m * 10 ** e).toPrecision(6));
      if (found.length > 2 || marks.length > 3) return found;
    }
  }
  // As Axis.limits of the figure, for what the reader left visible.
  function limits(axis, values) {
    const low = Math.min(...values), high = Math.max(...values), span = high - low || high || 1;
    if (axis.isLog) return [low / axis.factors[0], high * axis.factors[1]];
    if (axis.zero) return [0, high * (1 + axis.shares[1]) || 1];
    return [Math.max(0, low - axis.shares[0] * span), high + axis.shares[1] * span];
  }
  // Where its values lie between two edges of a plot, and where it has ticks.
  function place(axis, values, from, to) {
    const [low, high] = limits(axis, values), f = axis.isLog ? Math.log : (v) => v;
    axis.at = (v) => from + ((f(axis.isLog ? Math.max(v, 1e-9) : v) - f(low)) / (f(high) - f(low) || 1)) * (to - from);
    axis.ticks = axis.isLog ? logTicks(low, high) : linearTicks(low, high, Math.abs(to - from) / 70);
    if (!axis.at_values) return;
    axis.ticks = [];
    for (const v of [...new Set(values)].sort((a, b) => b - a)) if (!axis.ticks.length || Math.abs(axis.at(axis.ticks[0]) - axis.at(v)) > 30) axis.ticks.unshift(v);
  }

  const SHAPES = {
    o: (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
    s: (r) => `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    "^": (r) => polygon(3, r * 1.25, -90), v: (r) => polygon(3, r * 1.25, 90), "<": (r) => polygon(3, r * 1.25, 180),
    ">": (r) => polygon(3, r * 1.25, 0), D: (r) => polygon(4, r * 1.3, 0), d: (r) => polygon(4, r * 1.3, 0, 0.65),
    p: (r) => polygon(5, r * 1.15, -90), h: (r) => polygon(6, r * 1.15, -90),
  };
  function polygon(sides, r, turn, thin = 1) {
    const points = [];
    for (let i = 0; i < sides; i++) {
      const angle = ((turn + (360 * i) / sides) * Math.PI) / 180;
      points.push(`${(r * thin * Math.cos(angle)).toFixed(2)} ${(r * Math.sin(angle)).toFixed(2)}`);
    }
    return `M${points.join("L")}z`;
  }
  function marker(parent, curve, x, y, r, valid) {
    const open = curve.hollow || !valid;
    const look = open ? { fill: "#fff", stroke: curve.color, "stroke-width": valid ? 1.2 : 1.5 } : { fill: curve.color, stroke: curve.quiet ? curve.color : "#fff", "stroke-width": 1 };
    make("path", { d: SHAPES[curve.marker](valid ? r : r * 1.35), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, ...look }, parent);
    if (!valid) make("path", { d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`, stroke: "#1b1f24", "stroke-width": 1.3 }, parent);
  }
  const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${p.x.toFixed(1)} ${p.y.toFixed(1)}`).join("");

  // The points that no other beats, of those left visible; as pareto of pdlab/analysis/ranking.py.
  function pareto(points, lowerIsBetter) {
    const sign = lowerIsBetter ? 1 : -1, kept = [];
    for (const p of [...points].sort((a, b) => sign * (a.vx - b.vx) || b.vy - a.vy)) {
      const last = kept[kept.length - 1];
      if (!last || p.vy > last.vy || (p.vy === last.vy && p.vx === last.vx)) kept.push(p);
    }
    return kept;
  }
  // The outline of the intervals of a line: along the better ends, and back along the worse ones.
  function band(x, y, line) {
    const pairs = line.banded.map((level) => [DATA.columns[x.column][level], DATA.columns[y.column][level]]);
    const known = pairs.filter((pair) => pair.every((value) => value && value.length > 1));
    const [better, worse] = [1, 2].map((end) => known.map(([across, up]) => ({ x: x.at(across[end]), y: y.at(up[end]) })));
    return known.length > 1 ? `${path([...better, ...worse.reverse()])}z` : "";
  }

  function panel(spec, width) {
    const height = spec.main ? Math.max(300, Math.min(560, width * 0.56)) : Math.max(230, Math.min(300, width * 0.62));
    const box = { left: 52, right: width - 14, top: 24, bottom: height - 40 };
    const x = choose(spec.x), y = choose(spec.y), title = `${y.name} against ${x.name}`;
    const svg = make("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": `${title}; arrow keys walk through the points` });
    const lines = spec.lines.filter((line) => shown.includes(series[line.series])), known = new Map();
    for (const line of lines) for (const level of [...line.joined, ...line.off]) {
      const across = DATA.columns[x.column][level], up = DATA.columns[y.column][level];
      if (across && up) known.set(level, { level, curve: series[line.series], vx: across[0], vy: up[0] });
    }
    const at = (levels, from = known) => levels.filter((level) => from.has(level)).map((level) => from.get(level));
    const fronts = spec.main ? DATA.rivals.map((levels) => pareto(at(levels), x.better === "left")) : [];
    // A logarithmic axis has no place for 0.
    const drawn = new Map([...known].filter(([, p]) => (p.vx > 0 || !x.isLog) && (p.vy > 0 || !y.isLog)).sort(([a], [b]) => a - b));
    const points = [...drawn.values()], found = { svg, points, title, width };
    if (!points.length) return { ...found, svg: null };
    place(x, points.map((p) => p.vx), box.left, box.right);
    place(y, points.map((p) => p.vy), box.bottom, box.top);
    for (const p of points) { p.x = x.at(p.vx); p.y = y.at(p.vy); }
    for (const v of y.ticks) {
      make("line", { class: "grid", x1: box.left, x2: box.right, y1: y.at(v), y2: y.at(v) }, svg);
      make("text", { x: box.left - 7, y: y.at(v) + 4, "text-anchor": "end" }, svg, tick(v));
    }
    for (const v of x.ticks) {
      make("line", { class: "axis", x1: x.at(v), x2: x.at(v), y1: box.bottom, y2: box.bottom + 4 }, svg);
      make("text", { x: x.at(v), y: box.bottom + 17, "text-anchor": "middle" }, svg, tick(v));
    }
    make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
    const inside = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
    inside.viewBox = Object.values(inside).join(" ");
    make("text", { x: 2, y: 12 }, svg, y.isLog ? y.log_label : y.label);
    make("text", { x: box.right, y: height - 6, "text-anchor": "end" }, svg, x.isLog ? x.log_label : x.label);
    for (const best of fronts.map((each) => each.filter((p) => drawn.has(p.level))).filter((each) => each.length)) {
      make("path", { d: path(best), fill: "none", stroke: "#fbeeb0", "stroke-width": 10, "stroke-linejoin": "round", "stroke-linecap": "round" }, svg);
      for (const p of best) make("circle", { class: "ring", cx: p.x, cy: p.y, r: 9 }, svg);
    }
    for (const curve of [...shown].sort((a, b) => b.quiet - a.quiet)) {
      const group = make("g", { class: "curve", "data-i": curve.i }, svg);
      for (const line of lines.filter((each) => each.series === curve.i)) {
        const joined = at(line.joined, drawn), outline = band(x, y, line);
        if (outline) make("path", { class: "band", d: outline, fill: curve.color }, make("svg", inside, group));
        make("path", { d: path(joined), fill: "none", stroke: curve.color, "stroke-width": line.mark / 3, "stroke-dasharray": curve.dashes.map((d) => d * 1.5).join(" ") }, group);
        for (const p of joined) marker(group, curve, p.x, p.y, line.mark / 1.2, true);
        for (const p of at(line.off, drawn)) marker(group, curve, p.x, p.y, line.mark / 1.2, false);
      }
    }
    if (spec.main) names(svg, lines.map((line) => at(line.joined, drawn)), points, box);
    found.overlay = make("g", {}, svg);
    svg.addEventListener("pointermove", (event) => near(found, event));
    svg.addEventListener("pointerdown", (event) => near(found, event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") clear(); });
    svg.addEventListener("keydown", (event) => walk(found, event));
    svg.addEventListener("blur", clear);
    return found;
  }
  function names(svg, lines, points, box) {
    if (shown.filter((each) => !each.quiet).length > 12) return;
    const taken = points.map((p) => [p.x - 7, p.y - 7, p.x + 7, p.y + 7]);
    for (const line of lines) for (let i = 1; i < line.length; i++) {
      const [a, b] = [line[i - 1], line[i]], steps = Math.ceil(Math.hypot(b.x - a.x, b.y - a.y) / 8);
      for (let s = 1; s < steps; s++) {
        const x = a.x + ((b.x - a.x) * s) / steps, y = a.y + ((b.y - a.y) * s) / steps;
        taken.push([x - 2, y - 2, x + 2, y + 2]);
      }
    }
    for (const curve of shown.filter((each) => !each.quiet)) {
      const wide = 6.9 * curve.label.length + 4;
      // At the end of the line, else along it: the first place where nothing is covered.
      for (const p of lines.flat().filter((each) => each.curve === curve).reverse()) {
        const spots = [[p.x + 11, p.y - 6], [p.x + 11, p.y + 16], [p.x - wide - 9, p.y - 8], [p.x - wide / 2, p.y - 13], [p.x - wide / 2, p.y + 23], [p.x - wide - 9, p.y + 16]];
        const spot = spots.find(([x, y]) => x > box.left && x + wide < box.right + 12 && y - 11 > box.top && y < box.bottom && !taken.some((t) => x < t[2] && x + wide > t[0] && y - 11 < t[3] && y + 3 > t[1]));
        if (!spot) continue;
        taken.push([spot[0], spot[1] - 11, spot[0] + wide, spot[1] + 3]);
        make("text", { class: "name", "data-i": curve.i, x: spot[0], y: spot[1], style: `fill:${curve.ink}` }, svg, curve.label);
        break;
      }
    }
  }

  function draw(paper) {
    clear();
    const host = byId("panels"), whole = paper || host.clientWidth;
    host.replaceChildren();
    const columns = paper || getComputedStyle(host).gridTemplateColumns.split(" ").length > 1;
    byId("log").checked = choose(DATA.panels[0].x).isLog;
    panels = [];
    for (const spec of DATA.panels) {
      const found = panel(spec, spec.main || !columns ? whole : (whole - 26) / 2);
      if (!found.svg && !spec.main) continue;
      const figure = html("figure", host, undefined, spec.main ? "main" : "");
      html("h3", figure, found.title);
      if (found.svg) { figure.append(found.svg); panels.push(found); }
      else html("p", figure, shown.length ? `${found.title}: nothing in these runs.` : "Nothing is selected.", "nothing");
    }
  }

  function near(from, event) {
    const frame = from.svg.getBoundingClientRect(), zoom = from.width / frame.width;
    const x = (event.clientX - frame.left) * zoom, y = (event.clientY - frame.top) * zoom;
    let best = null, least = (event.pointerType === "mouse" ? 26 : 44) ** 2;
    for (const p of from.points) {
      const distance = (p.x - x) ** 2 + (p.y - y) ** 2;
      if (distance < least) { least = distance; best = p; }
    }
    if (best) show(best, event.clientX, event.clientY);
    else clear();
  }
  function walk(from, event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") clear();
    if (!step) return;
    event.preventDefault();
    const now = pinned ? from.points.findIndex((p) => p.level === pinned.level) : -1;
    const p = from.points[(now + step + from.points.length + (now < 0 && step < 0 ? 1 : 0)) % from.points.length];
    const frame = from.svg.getBoundingClientRect(), zoom = frame.width / from.width;
    show(p, frame.left + p.x * zoom, frame.top + p.y * zoom);
  }
  function focus(i) {
    for (const each of panels) {
      each.svg.classList.toggle("focus", i !== null);
      for (const node of each.svg.querySelectorAll("[data-i]")) node.classList.toggle("on", +node.dataset.i === i);
    }
  }
  function show(p, x, y) {
    const tip = byId("tip");
    if (!pinned || pinned.level !== p.level) {
      pinned = p;
      focus(p.curve.i);
      for (const each of panels) {
        each.overlay.replaceChildren();
        for (const q of each.points) if (q.level === p.level) make("circle", { class: "here", cx: q.x, cy: q.y, r: 8 }, each.overlay);
      }
      tip.replaceChildren(...describe(p.curve, p.level));
      tip.hidden = false;
    }
    const wide = tip.offsetWidth, high = tip.offsetHeight, right = x + 18 + wide < innerWidth;
    tip.style.left = `${Math.max(6, right ? x + 18 : x - wide - 18)}px`;
    tip.style.top = `${Math.max(6, Math.min(y + 14, innerHeight - high - 6))}px`;
  }
  function clear() {
    pinned = null;
    byId("tip").hidden = true;
    focus(null);
    for (const each of panels) each.overlay.replaceChildren();
  }
  function describe(curve, number) {
    const level = DATA.levels[number];
    const parts = [html("strong", null, curve.label), html("div", null, `${curve.facts}; ${curve.name}`, "soft"), html("div", null, level.summary)];
    for (const rows of level.tables) {
      const table = html("table");
      rows.forEach((texts, i) => { const line = html("tr", table); texts.forEach((text, j) => html(i ? "td" : "th", line, text, j ? "" : "text")); });
      parts.push(table);
    }
    parts.push(html("span", null, level.verdict, level.valid ? "fine" : "mark"));
    if (level.left_out) parts.push(html("span", null, level.left_out, "mark"));
    return parts;
  }

  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    view.group = byId("group").value;
    const matches = series.map((curve) => words.every((word) => curve.words.includes(word)) && (!view.group || curve.groups.includes(view.group)));
    shown = series.filter((curve, i) => curve.on && matches[i]);
    const visible = new Set(shown.map((curve) => curve.i));
    for (const chip of document.querySelectorAll("#legend .chip")) {
      chip.hidden = !matches[chip.dataset.i];
      chip.setAttribute("aria-pressed", series[chip.dataset.i].on);
    }
    for (const family of document.querySelectorAll("#legend .family")) family.hidden = !family.querySelector(".chip:not([hidden])");
    for (const line of document.querySelectorAll("#levels tr[data-curve]")) line.hidden = !visible.has(+line.dataset.curve);
    draw();
  }
  function legend() {
    const families = new Map();
    for (const curve of [...series].sort((a, b) => a.rank - b.rank)) families.set(curve.family, [...(families.get(curve.family) || []), curve]);
    for (const [name, members] of families) {
      const host = html("div", byId("legend"), undefined, "family");
      const heading = html("button", host, name, "heading");
      heading.type = "button";
      heading.addEventListener("click", () => { const on = !members.every((curve) => curve.on); for (const curve of members) curve.on = on; filter(); });
      for (const curve of members) {
        const chip = html("button", host, undefined, "chip");
        chip.type = "button"; chip.dataset.i = curve.i;
        const svg = make("svg", { width: 34, height: 14, "aria-hidden": "true" }, chip);
        make("path", { d: "M0 7H34", stroke: curve.color, "stroke-width": 2, "stroke-dasharray": curve.dashes.map((d) => d * 1.3).join(" ") }, svg);
        marker(svg, curve, 17, 7, 4.2, true);
        html("span", chip, curve.label);
        chip.addEventListener("click", () => { curve.on = !curve.on; filter(); });
        chip.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") focus(curve.i); });
        chip.addEventListener("pointerleave", () => focus(null));
      }
    }
  }
  function choices(id, options, value, changed) {
    const select = byId(id);
    for (const [key, text] of options) select.add(new Option(text, key, false, key === value));
    select.addEventListener("change", () => changed(select.value));
  }
  function controls() {
    for (const [name, options] of Object.entries(DATA.choices)) choices(name, options, view[name], (value) => { view[name] = value; draw(); });
    // With several groups the largest is shown first.
    choices("group", [["", "all"], ...DATA.groups.map((name) => [name, name])], DATA.groups.length > 1 ? DATA.groups[0] : "", filter);
    byId("group").parentElement.hidden = DATA.groups.length < 2;
    byId("filter").addEventListener("input", filter);
    byId("log").addEventListener("change", (event) => { view.log = event.target.checked; draw(); });
  }

  controls();
  legend();
  filter();
  let width = byId("panels").clientWidth;
  addEventListener("resize", () => { if (byId("panels").clientWidth !== width) { width = byId("panels").clientWidth; draw(); } });
  addEventListener("beforeprint", () => { for (const node of document.querySelectorAll("details")) node.open = true; draw(690); });
  addEventListener("afterprint", () => draw());
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) clear(); });
  performance.mark("pdlab-drawn");
})();
