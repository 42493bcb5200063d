"use strict";
// Draws the plots of a report from the figures in #payload, and filters plots and table. Text enters the page
// as text alone (textContent), so that no name in the data can become markup.
(() => {
  const DATA = JSON.parse(document.getElementById("payload").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  const LATENCIES = {
    token: ["TPOT", "ms"], first_token: ["TTFT", "ms"], chunk: [`${DATA.view.chunk}-token chunk latency`, "ms"],
    interactivity: ["interactivity", "tokens/s per user"], e2el: ["E2EL", "ms"],
  };
  const RATES = { output: "output tokens/s", input: "input tokens/s", total: "total tokens/s", requests: "requests/s" };
  const PER = { node: DATA.node, gpu: DATA.unit, whole: "whole deployment" };
  const view = { latency: DATA.view.latency, stat: DATA.view.stat, rate: DATA.view.rate, per: DATA.view.per, log: DATA.view.log };
  const curves = DATA.curves.map((curve, i) => ({ ...curve, i, on: true, words: `${curve.label} ${curve.name} ${curve.family}`.toLowerCase() }));
  let shown = curves, panels = [], pinned = null;

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
  function number(value) {
    if (value === undefined || value === null) return "-";
    const size = Math.abs(value);
    return value.toFixed(size < 1 ? 3 : size < 10 ? 2 : size < 1000 ? 1 : 0);
  }
  const tick = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

  // What a point shows: [value, low, high]; low and high are undefined where no interval is known.
  function ms(point, metric, stat) {
    const value = (point.l[metric] || {})[stat];
    return value === undefined ? null : [value, ...((point.li[metric] || {})[stat] || [])];
  }
  function latency(point) {
    if (view.latency === "first_token") return ms(point, "ttft", view.stat);
    if (view.latency === "e2el") return ms(point, "e2el", view.stat);
    const tpot = ms(point, "tpot", view.stat), ttft = ms(point, "ttft", view.stat);
    if (view.latency === "token" || !tpot) return tpot;
    if (view.latency === "chunk") return ttft && [(DATA.view.chunk - 1) * tpot[0] + ttft[0]];
    return tpot.length > 1 && tpot[1] > 0 ? [1000 / tpot[0], 1000 / tpot[2], 1000 / tpot[1]] : [1000 / tpot[0]];
  }
  const scale = (curve) => (view.per === "whole" ? 1 : (view.per === "gpu" ? 1 : DATA.view.nodeGpus) / curve.gpus);
  const rate = (curve, point) => [point.r[view.rate], ...(point.ri[view.rate] || [])].map((v) => v * scale(curve));

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
  function axis(values, log, zero, from, to, pad) {
    let low = Math.min(...values), high = Math.max(...values);
    if (log && low > 0) {
      low /= 1.12; high *= 1.15;
      const a = Math.log(low), b = Math.log(high);
      return { at: (v) => from + ((Math.log(v) - a) / (b - a)) * (to - from), ticks: logTicks(low, high) };
    }
    const span = high - low || high || 1;
    low = zero ? 0 : Math.max(0, low - pad * span); high += (zero ? 0.06 : 1.6 * pad) * span;
    return { at: (v) => from + ((v - low) / (high - low || 1)) * (to - from), ticks: linearTicks(low, high, Math.abs(to - from) / 70) };
  }
  function loadAxis(values, from, to) {
    const loads = [...new Set(values)].sort((a, b) => a - b), low = loads[0], high = loads[loads.length - 1];
    const log = low > 0 && high / low >= 8;
    const at = log ? (v) => from + 12 + (Math.log(v / low) / Math.log(high / low)) * (to - from - 24) : (v) => from + (v / high) * (to - from - 12);
    const ticks = [];
    for (const load of loads.reverse()) if (!ticks.length || at(ticks[0]) - at(load) > 30) ticks.unshift(load);
    return { at, ticks };
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
    const look = valid ? { fill: curve.color, stroke: "#fff", "stroke-width": 1 } : { fill: "#fff", stroke: curve.color, "stroke-width": 1.5 };
    make("path", { d: SHAPES[curve.marker](valid ? r : r * 1.35), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, ...look }, parent);
    if (!valid) make("path", { d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`, stroke: "#1b1f24", "stroke-width": 1.3 }, parent);
  }
  const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${p.x.toFixed(1)} ${p.y.toFixed(1)}`).join("");

  // The indexes of the points that no other beats; as pdlab/analysis/ranking.py has it.
  function pareto(points, lowerIsBetter) {
    const sign = lowerIsBetter ? 1 : -1, kept = [];
    for (const p of [...points].sort((a, b) => sign * (a.vx - b.vx) || b.vy - a.vy)) {
      const last = kept[kept.length - 1];
      if (!last || p.vy > last.vy || (p.vy === last.vy && p.vx === last.vx)) kept.push(p);
    }
    return kept;
  }

  // Whether the best level of one curve is far above that of another; as pdlab/report/scales.py has it.
  function spans(points) {
    const best = new Map();
    for (const p of points) if (p.point.ok && p.vy > 0) best.set(p.curve, Math.max(p.vy, best.get(p.curve) || 0));
    return best.size > 0 && Math.max(...best.values()) > DATA.view.span * Math.min(...best.values());
  }

  function panel(spec, width) {
    const height = spec.main ? Math.max(300, Math.min(560, width * 0.56)) : Math.max(230, Math.min(300, width * 0.62));
    const box = { left: 52, right: width - 14, top: 24, bottom: height - 40 };
    const svg = make("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": `${spec.title}; arrow keys walk through the points` });
    const points = [];
    for (const curve of shown) curve.points.forEach((point, j) => {
      const x = spec.x(curve, point), y = spec.y(curve, point);
      if (x && y) points.push({ curve, point, j, vx: x[0], vy: y[0], ix: x, iy: y });
    });
    if (!points.length) return null;
    const xs = spec.main ? axis(points.map((p) => p.vx), view.log && view.latency !== "interactivity", false, box.left, box.right, 0.06) : loadAxis(points.map((p) => p.vx), box.left, box.right);
    const logY = spec.main ? spans(points) : view.log;
    const ys = axis(points.map((p) => p.vy), logY, true, box.bottom, box.top + 8, 0.06);
    for (const p of points) { p.x = xs.at(p.vx); p.y = ys.at(p.vy); }
    for (const v of ys.ticks) {
      make("line", { class: "grid", x1: box.left, x2: box.right, y1: ys.at(v), y2: ys.at(v) }, svg);
      make("text", { x: box.left - 7, y: ys.at(v) + 4, "text-anchor": "end" }, svg, tick(v));
    }
    for (const v of xs.ticks) {
      make("line", { class: "axis", x1: xs.at(v), x2: xs.at(v), y1: box.bottom, y2: box.bottom + 4 }, svg);
      make("text", { x: xs.at(v), y: box.bottom + 17, "text-anchor": "middle" }, svg, tick(v));
    }
    make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
    make("text", { x: 2, y: 12 }, svg, spec.main && logY ? `${spec.yName} (${DATA.view.logName})` : spec.yName);
    make("text", { x: box.right, y: height - 6, "text-anchor": "end" }, svg, spec.xName);
    if (spec.main && comparable()) {
      const ranked = points.filter((p) => p.point.ok && !p.curve.published);
      for (const kind of new Set(ranked.map((p) => p.point.k))) {
        const best = pareto(ranked.filter((p) => p.point.k === kind), view.latency !== "interactivity");
        make("path", { d: path(best), fill: "none", stroke: "#fbeeb0", "stroke-width": 10, "stroke-linejoin": "round", "stroke-linecap": "round" }, svg);
        for (const p of best) make("circle", { class: "ring", cx: p.x, cy: p.y, r: 9 }, svg);
      }
    }
    const size = spec.main ? 5 : 3.8;
    for (const curve of shown) {
      const mine = points.filter((p) => p.curve === curve);
      const group = make("g", { class: "curve", "data-i": curve.i }, svg);
      for (const kind of Object.keys(DATA.loads)) {
        const line = mine.filter((p) => p.point.ok && p.point.k === kind);
        if (!line.length) continue;
        if (!spec.main && line.every((p) => p.iy.length > 1)) {
          const up = line.map((p) => ({ x: p.x, y: Math.max(box.top, ys.at(p.iy[2])) }));
          const down = line.map((p) => ({ x: p.x, y: Math.min(box.bottom, ys.at(Math.max(p.iy[1], 1e-9))) })).reverse();
          make("path", { class: "band", d: `${path([...up, ...down])}z`, fill: curve.color }, group);
        }
        make("path", { d: path(line), fill: "none", stroke: curve.color, "stroke-width": spec.main ? 2 : 1.6, "stroke-dasharray": curve.dashes.map((d) => d * 1.5).join(" ") }, group);
      }
      if (spec.main) for (const p of mine) if (p.point.ok) whiskers(group, p, xs, ys, box);
      for (const p of mine) marker(group, curve, p.x, p.y, size, p.point.ok);
    }
    if (spec.main) names(svg, points, box);
    const overlay = make("g", {}, svg);
    const found = { svg, points, overlay, spec, width };
    svg.addEventListener("pointermove", (event) => near(found, event));
    svg.addEventListener("pointerdown", (event) => near(found, event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") clear(); });
    svg.addEventListener("keydown", (event) => walk(found, event));
    svg.addEventListener("blur", clear);
    return found;
  }
  function whiskers(group, p, xs, ys, box) {
    const clampX = (v) => Math.max(box.left, Math.min(box.right, v)), clampY = (v) => Math.max(box.top, Math.min(box.bottom, v));
    let d = "";
    if (p.ix.length > 1) d += `M${clampX(xs.at(Math.max(p.ix[1], 1e-9)))} ${p.y}H${clampX(xs.at(p.ix[2]))}`;
    if (p.iy.length > 1) d += `M${p.x} ${clampY(ys.at(Math.max(p.iy[1], 1e-9)))}V${clampY(ys.at(p.iy[2]))}`;
    if (d) make("path", { class: "whisker", d, stroke: p.curve.color }, group);
  }
  function names(svg, points, box) {
    if (shown.filter((each) => !each.quiet).length > 12) return;
    const taken = points.map((p) => [p.x - 7, p.y - 7, p.x + 7, p.y + 7]);
    for (const curve of shown) for (const kind of Object.keys(DATA.loads)) {
      const line = points.filter((p) => p.curve === curve && p.point.ok && p.point.k === kind);
      for (let i = 1; i < line.length; i++) {
        const [a, b] = [line[i - 1], line[i]], steps = Math.ceil(Math.hypot(b.x - a.x, b.y - a.y) / 8);
        for (let s = 1; s < steps; s++) {
          const x = a.x + ((b.x - a.x) * s) / steps, y = a.y + ((b.y - a.y) * s) / steps;
          taken.push([x - 2, y - 2, x + 2, y + 2]);
        }
      }
    }
    for (const curve of shown.filter((each) => !each.quiet)) {
      const mine = points.filter((p) => p.curve === curve && p.point.ok);
      const wide = 6.9 * curve.label.length + 4;
      // At the end of the line, else along it: the first place where nothing is covered.
      for (const p of mine.reverse()) {
        const spots = [[p.x + 11, p.y - 6], [p.x + 11, p.y + 16], [p.x - wide - 9, p.y - 8], [p.x - wide / 2, p.y - 13], [p.x - wide / 2, p.y + 23], [p.x - wide - 9, p.y + 16]];
        const spot = spots.find(([x, y]) => x > box.left && x + wide < box.right + 12 && y - 11 > box.top && y < box.bottom && !taken.some((t) => x < t[2] && x + wide > t[0] && y - 11 < t[3] && y + 3 > t[1]));
        if (!spot) continue;
        taken.push([spot[0], spot[1] - 11, spot[0] + wide, spot[1] + 3]);
        make("text", { class: "name", "data-i": curve.i, x: spot[0], y: spot[1], style: `fill:${curve.ink}` }, svg, curve.label);
        break;
      }
    }
  }
  const comparable = () => new Set(shown.filter((curve) => !curve.published).map((curve) => curve.group)).size === 1;

  function specs() {
    const [name, unit] = LATENCIES[view.latency];
    const per = view.per === "whole" ? "whole deployment" : `per ${PER[view.per]}`;
    const better = view.latency === "interactivity" ? "right" : "left";
    const found = [{ main: true, title: `Throughput against ${name}`, x: (c, p) => latency(p), y: (c, p) => rate(c, p), xName: `${name} ${view.stat}, ${unit} (${better} is better)`, yName: `${RATES[view.rate]}, ${per}` }];
    for (const kind of Object.keys(DATA.loads)) {
      if (!curves.some((curve) => curve.points.some((point) => point.k === kind))) continue;
      for (const metric of ["tpot", "ttft"]) found.push({
        title: `${metric.toUpperCase()} against ${DATA.loads[kind].title}`, x: (c, p) => (p.k === kind ? [p.v] : null),
        y: (c, p) => ms(p, metric, view.stat), xName: DATA.loads[kind].name, yName: `${metric.toUpperCase()} ${view.stat}, ms`,
      });
    }
    return found;
  }
  function draw(paper) {
    clear();
    const host = byId("panels"), whole = paper || host.clientWidth;
    host.replaceChildren();
    const columns = paper || getComputedStyle(host).gridTemplateColumns.split(" ").length > 1;
    panels = [];
    for (const spec of specs()) {
      const figure = html("figure", null, undefined, spec.main ? "main" : "");
      html("h3", figure, spec.title);
      if (spec.main && shown.length && !comparable()) html("figcaption", figure, "Not all that is shown may be compared with each other: no frontier is drawn.");
      const found = panel(spec, spec.main || !columns ? whole : (whole - 26) / 2);
      if (!found && !spec.main) continue;
      if (found) { figure.append(found.svg); panels.push(found); }
      else html("p", figure, shown.length ? `No ${LATENCIES[view.latency][0]} ${view.stat} in these runs.` : "Nothing is selected.", "nothing");
      host.append(figure);
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
    const now = pinned ? from.points.findIndex((p) => p.curve === pinned.curve && p.j === pinned.j) : -1;
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
    if (!pinned || pinned.curve !== p.curve || pinned.j !== p.j) {
      pinned = p;
      focus(p.curve.i);
      for (const each of panels) {
        each.overlay.replaceChildren();
        for (const q of each.points) if (q.curve === p.curve && q.j === p.j) make("circle", { class: "here", cx: q.x, cy: q.y, r: 8 }, each.overlay);
      }
      tip.replaceChildren(...describe(p.curve, p.point));
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
  function describe(curve, point) {
    const parts = [], add = (node) => parts.push(node);
    add(html("strong", null, curve.label));
    add(html("div", null, `${curve.facts}; ${curve.name}`, "soft"));
    const load = DATA.loads[point.k].level.replace("{}", point.v);
    add(html("div", null, `${load}, ${point.n} repeat${point.n > 1 ? "s" : ""}${point.x ? ` (${point.x} more left out)` : ""}, ${point.w === "steady" ? "steady window" : "whole run"}`));
    const table = html("table"), stats = DATA.stats.filter((stat) => Object.values(point.l).some((values) => stat in values));
    row(table, "th", ["ms", ...stats]);
    for (const metric of Object.keys(point.l)) row(table, "td", [metric.toUpperCase(), ...stats.map((stat) => withHalf(ms(point, metric, stat)))]);
    add(table);
    const rates = html("table");
    row(rates, "th", ["per second", "whole deployment", `per ${PER.node}`]);
    for (const name of Object.keys(RATES)) {
      const value = [point.r[name], ...(point.ri[name] || [])];
      row(rates, "td", [RATES[name].replace("/s", ""), ...[1, DATA.view.nodeGpus / curve.gpus].map((by) => withHalf(value.map((v) => v * by)))]);
    }
    add(rates);
    add(html("span", null, point.ok ? "valid" : `not valid: ${point.why.join("; ")}`, point.ok ? "fine" : "mark"));
    if (point.ok && point.why.length) add(html("span", null, `left out: ${point.why.join("; ")}`, "mark"));
    return parts;
  }
  function withHalf(value) {
    if (!value) return "-";
    if (value.length < 2 || !value[0]) return number(value[0]);
    const share = (value[2] - value[0]) / value[0];
    return `${number(value[0])} ±${share > 1 ? ">100" : (share * 100).toFixed(0)}%`;
  }
  function row(table, cell, texts) {
    const line = html("tr", table);
    texts.forEach((text, i) => html(cell, line, text, i ? "" : "text"));
  }

  function filter() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean), group = byId("group").value;
    const matches = curves.map((curve) => words.every((word) => curve.words.includes(word)) && (!group || curve.group === group));
    shown = curves.filter((curve, i) => curve.on && matches[i]);
    const visible = new Set(shown.map((curve) => curve.i));
    for (const chip of document.querySelectorAll("#legend .chip")) {
      chip.hidden = !matches[chip.dataset.i];
      chip.setAttribute("aria-pressed", curves[chip.dataset.i].on);
    }
    for (const family of document.querySelectorAll("#legend .family")) family.hidden = !family.querySelector(".chip:not([hidden])");
    for (const line of document.querySelectorAll("#levels tr[data-curve]")) line.hidden = !visible.has(+line.dataset.curve);
    draw();
  }
  function legend() {
    const families = new Map();
    for (const curve of [...curves].sort((a, b) => a.rank - b.rank)) families.set(curve.family, [...(families.get(curve.family) || []), curve]);
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
    const known = (metric) => curves.some((curve) => curve.points.some((point) => point.l[metric]));
    const needs = { token: ["tpot"], first_token: ["ttft"], chunk: ["tpot", "ttft"], interactivity: ["tpot"], e2el: ["e2el"] };
    const latencies = Object.keys(LATENCIES).filter((key) => needs[key].every(known));
    const redraw = (key) => (value) => { view[key] = value; draw(); };
    choices("latency", latencies.map((key) => [key, LATENCIES[key][0]]), view.latency, redraw("latency"));
    choices("stat", DATA.stats.map((stat) => [stat, stat === "p50" ? "p50 (median)" : stat]), view.stat, redraw("stat"));
    choices("rate", Object.entries(RATES), view.rate, redraw("rate"));
    choices("per", Object.entries(PER), view.per, redraw("per"));
    // With several groups the largest is shown first: one frontier over all of them would mean nothing.
    const count = (group) => curves.filter((curve) => curve.group === group).length;
    const groups = [...new Set(curves.map((curve) => curve.group))].sort((a, b) => count(b) - count(a));
    choices("group", [["", "all"], ...groups.map((g) => [g, g])], groups.length > 1 ? groups[0] : "", filter);
    byId("group").parentElement.hidden = groups.length < 2;
    byId("filter").addEventListener("input", filter);
    byId("log").checked = view.log;
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
