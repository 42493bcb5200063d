"use strict";
// Makes panels of figure.js from the curves in #payload (pdlab/report/curve_figure.py has what its parts mean), for the
// reader's choices, and filters plots and table.
(() => {
  const DATA = JSON.parse(document.getElementById("payload").textContent), { make, html } = figures;
  const byId = (id) => document.getElementById(id);
  const view = { ...DATA.chosen, group: "", log: null };
  const series = DATA.series.map((each, i) => ({ ...each, ...each.style, i, on: true, words: `${each.label} ${each.name} ${each.style.family}`.toLowerCase() }));
  let shown = series, panels = [], pinned = null;

  // The axis that is chosen for one side of a panel, and whether it is logarithmic.
  function choose(side) {
    const axis = side.axes[side.by.map((name) => view[name]).join(".")];
    return { ...axis, isLog: axis.free && view.log !== null ? view.log : axis.log.includes(view.group) };
  }
  // As ColumnAxis.limits of the figure, for what the reader left visible.
  function limits(axis, values) {
    const low = Math.min(...values), high = Math.max(...values), span = high - low || high || 1;
    if (axis.isLog) return [low / axis.factors[0], high * axis.factors[1]];
    if (axis.zero) return [0, high * (1 + axis.shares[1]) || 1];
    return [Math.max(0, low - axis.shares[0] * span), high + axis.shares[1] * span];
  }
  // The points that no other beats, of those left visible; as pareto of pdlab/analysis/ranking.py.
  function pareto(points, lowerIsBetter) {
    const sign = lowerIsBetter ? 1 : -1, kept = [];
    for (const p of [...points].sort((a, b) => sign * (a.vx - b.vx) || b.vy - a.vy)) {
      const last = kept[kept.length - 1];
      if (!last || p.vy > last.vy || (p.vy === last.vy && p.vx === last.vx)) kept.push(p);
    }
    return kept;
  }
  // A side of a panel as figure.js draws it, for these values.
  function axisOf(axis, values) {
    const [low, high] = limits(axis, values);
    return { label: axis.isLog ? axis.log_label : axis.label, low, high, log: axis.isLog, at: axis.at_values ? values : [], ticks: [], groups: [] };
  }
  // The outline of the intervals of a line: along the better ends, and back along the worse ones.
  function band(x, y, line) {
    const pairs = line.banded.map((level) => [DATA.columns[x.column][level], DATA.columns[y.column][level]]);
    const known = pairs.filter((pair) => pair.every((value) => value && value.length > 1));
    const [better, worse] = [1, 2].map((end) => known.map(([across, up]) => [across[end], up[end]]));
    return known.length > 1 ? [...better, ...worse.reverse()] : [];
  }

  function panel(spec, width) {
    const height = spec.main ? Math.max(300, Math.min(560, width * 0.56)) : Math.max(230, Math.min(300, width * 0.62));
    const x = choose(spec.x), y = choose(spec.y), title = `${y.name} against ${x.name}`;
    const lines = spec.lines.filter((line) => shown.includes(series[line.series])), known = new Map();
    for (const line of lines) for (const level of [...line.joined, ...line.off]) {
      const across = DATA.columns[x.column][level], up = DATA.columns[y.column][level];
      if (across && up) known.set(level, { level, vx: across[0], vy: up[0] });
    }
    const fronts = spec.main ? DATA.rivals.map((levels) => pareto(levels.filter((level) => known.has(level)).map((level) => known.get(level)), x.better === "left")) : [];
    // A logarithmic axis has no place for 0.
    const has = ({ vx, vy }) => (vx > 0 || !x.isLog) && (vy > 0 || !y.isLog), places = [...known.values()].filter(has);
    if (!places.length) return { svg: null, title };
    const drawn = ({ color, dashes, marker, hollow, quiet, i }, line, off) => {
      const levels = (off ? line.off : line.joined).filter((level) => known.has(level) && has(known.get(level)));
      const look = { look: off ? "crossed" : hollow && !quiet ? "hollow" : "full", width: off ? 0 : line.width, mark: line.mark, area: off ? [] : band(x, y, line), reach: [] };
      return { ...look, color, dashes, marker, quiet, curve: i, levels, points: levels.map((level) => [known.get(level).vx, known.get(level).vy]) };
    };
    const ordered = [...lines].sort((a, b) => series[b.series].quiet - series[a.series].quiet);
    const made = {
      title: `${title}; arrow keys walk through the points`, spans: [], blocks: [],
      x: axisOf(x, places.map((p) => p.vx)), y: axisOf(y, places.map((p) => p.vy)),
      lines: ordered.flatMap((line) => [drawn(series[line.series], line, false), drawn(series[line.series], line, true)]),
      frontiers: fronts.map((front) => front.filter(has).map((p) => [p.vx, p.vy])).filter((front) => front.length),
    };
    const { svg, box, points } = figures.paint(made, width, height, { tabindex: 0 });
    for (const p of points) p.curve = series[p.line.curve];
    points.sort((a, b) => a.level - b.level);
    const found = { svg, points, title, width };
    if (spec.main) names(svg, made.lines.map((line) => points.filter((p) => p.line === line && line.width)), points, box);
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
        figures.marker(svg, { ...curve, look: curve.hollow ? "hollow" : "full" }, 17, 7, 4.2);
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
  figures.redraw(draw);
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) clear(); });
  performance.mark("pdlab-drawn");
})();
