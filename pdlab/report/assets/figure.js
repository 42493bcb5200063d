"use strict";
// Draws figures as SVG; pdlab/report/figure.py has what their parts mean. Text enters the page as text alone
// (textContent), so that no name in the data can become markup.
const figures = (() => {
  const NS = "http://www.w3.org/2000/svg", PX_PER_IN = 90, LEAST_WIDTH = 330, MOST_WIDTH = 760, GAP = 26, CHAR = 6.4;

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
      if (found.length > 2) return found;
    }
    return linearTicks(low, high, 4);
  }
  // Where the values of an axis lie between two edges of a plot, and its ticks with their names.
  function place(axis, from, to) {
    const f = axis.log ? Math.log : (v) => v, { low, high } = axis;
    const at = (v) => from + ((f(axis.log ? Math.max(v, 1e-9) : v) - f(low)) / (f(high) - f(low) || 1)) * (to - from);
    if (axis.ticks.length) return { at, ticks: axis.ticks.map(([v, name]) => [v, name.replace("\n", " ")]) };
    let values = axis.log ? logTicks(low, high) : linearTicks(low, high, Math.abs(to - from) / 70);
    if (axis.at.length) {
      values = [];
      for (const v of [...new Set(axis.at)].sort((a, b) => b - a)) if (!values.length || Math.abs(at(values[0]) - at(v)) > 30) values.unshift(v);
    }
    return { at, ticks: values.map((v) => [v, tick(v)]) };
  }

  const SHAPES = {
    o: (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
    s: (r) => `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    "^": (r) => polygon(3, r * 1.25, -90), v: (r) => polygon(3, r * 1.25, 90), "<": (r) => polygon(3, r * 1.25, 180),
    ">": (r) => polygon(3, r * 1.25, 0), D: (r) => polygon(4, r * 1.3, 0), d: (r) => polygon(4, r * 1.3, 0, 0.65),
    p: (r) => polygon(5, r * 1.15, -90), h: (r) => polygon(6, r * 1.15, -90),
  };
  function polygon(corners, r, turn, thin = 1) {
    const points = [];
    for (let i = 0; i < corners; i++) {
      const angle = ((turn + (360 / corners) * i) * Math.PI) / 180;
      points.push(`${(r * thin * Math.cos(angle)).toFixed(2)} ${(r * Math.sin(angle)).toFixed(2)}`);
    }
    return `M${points.join("L")}z`;
  }
  const cross = (x, y, r, look, parent) => make("path", { d: `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`, ...look }, parent);
  function marker(parent, line, x, y, r) {
    if (line.marker === "x") return cross(x, y, r, { stroke: line.color, "stroke-width": 1.3 }, parent);
    const crossed = line.look === "crossed", open = line.look !== "full";
    const look = open ? { fill: "#fff", stroke: line.color, "stroke-width": crossed ? 1.5 : 1.2 } : { fill: line.color, stroke: line.quiet ? line.color : "#fff", "stroke-width": 1 };
    make("path", { d: SHAPES[line.marker](crossed ? r * 1.35 : r), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, ...look }, parent);
    if (crossed) cross(x, y, 3, { stroke: line.quiet ? line.color : "#1b1f24", "stroke-width": 1.3 }, parent);
  }
  // Nothing is drawn across a y of null.
  const path = (points) => points.map((p, i) => (p.y === null ? "" : `${i && points[i - 1].y !== null ? "L" : "M"}${p.x.toFixed(1)} ${p.y.toFixed(1)}`)).join("");
  const dashes = (line) => line.dashes.map((d) => d * 1.5).join(" ");

  // A panel of these sizes: its SVG, the edges of its plot, and its points where they lie.
  function paint(panel, width, height, attributes) {
    const named = Math.max(0, ...panel.y.ticks.map(([, name]) => name.length));
    const rooms = panel.x.groups.map(([, room, name]) => wrap(name, ((width - 66) * room) / (panel.x.high - panel.x.low) / CHAR));
    const box = { left: Math.max(52, CHAR * named + 14), right: width - 14, top: 24, bottom: height - (panel.x.label || rooms.length ? 40 : 24) - 13 * Math.max(0, ...rooms.map((each) => each.length)) };
    const x = place(panel.x, box.left, box.right), y = place(panel.y, box.bottom, box.top);
    const svg = make("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title || panel.y.label, ...attributes });
    for (const span of panel.spans) {
      make("rect", { class: "span", x: x.at(span.begins), y: box.top, width: Math.max(1, x.at(span.ends) - x.at(span.begins)), height: box.bottom - box.top }, svg);
      make("text", { x: x.at(span.begins), y: box.top - 3 }, svg, span.name);
    }
    for (const [v, name] of y.ticks) {
      if (!named) make("line", { class: "grid", x1: box.left, x2: box.right, y1: y.at(v), y2: y.at(v) }, svg);
      make("text", { x: box.left - 7, y: y.at(v) + 4, "text-anchor": "end" }, svg, name);
    }
    // Names of places that have room.
    const wide = CHAR * (2 + Math.max(0, ...panel.x.ticks.map(([, name]) => name.length)));
    const each = panel.x.ticks.length ? Math.ceil((wide * x.ticks.length) / (box.right - box.left)) : 1;
    for (const [v, name] of x.ticks.filter((_, i) => i % each === 0)) {
      make("line", { class: "axis", x1: x.at(v), x2: x.at(v), y1: box.bottom, y2: box.bottom + 4 }, svg);
      make("text", { x: x.at(v), y: box.bottom + 17, "text-anchor": "middle" }, svg, name);
    }
    panel.x.groups.forEach(([v], i) => rooms[i].forEach((text, row) => make("text", { class: "group", x: x.at(v), y: box.bottom + 31 + 13 * row, "text-anchor": "middle" }, svg, text)));
    make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
    make("text", { x: 2, y: 12 }, svg, panel.y.label.replace("\n", " "));
    make("text", { x: box.right, y: height - 6, "text-anchor": "end" }, svg, panel.x.label);
    for (const block of panel.blocks) {
      const [across, up] = [x, y].map((axis, side) => [axis.at(block.at[side]), axis.at(block.to[side])].sort((a, b) => a - b));
      const rect = make("rect", { x: across[0], y: up[0], width: across[1] - across[0], height: up[1] - up[0], fill: block.color, stroke: block.edge, "stroke-width": 0.3 }, svg);
      if (block.name) make("title", {}, rect, block.name);
      if (block.text) make("text", { x: (across[0] + across[1]) / 2, y: (up[0] + up[1]) / 2 + 4, "text-anchor": "middle" }, svg, block.text);
    }
    const where = ([vx, vy]) => ({ x: x.at(vx), y: vy === null ? null : y.at(vy) });
    const part = (line, name) => make("g", line.curve === undefined ? {} : { class: name, "data-i": line.curve }, svg);
    for (const line of panel.lines.filter((each) => each.area.length)) {
      const inside = make("svg", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, viewBox: `${box.left} ${box.top} ${box.right - box.left} ${box.bottom - box.top}` }, part(line, "bands"));
      make("path", { class: "band", d: `${path(line.area.map(where))}z`, fill: line.color }, inside);
    }
    for (const best of panel.frontiers.map((points) => points.map(where))) {
      make("path", { d: path(best), fill: "none", stroke: "#fbeeb0", "stroke-width": 10, "stroke-linejoin": "round", "stroke-linecap": "round" }, svg);
      for (const p of best) make("circle", { class: "ring", cx: p.x, cy: p.y, r: 9 }, svg);
    }
    const points = [], groups = new Map();
    for (const line of panel.lines) {
      // The lines of one curve are in one group.
      const curve = line.curve === undefined ? line : line.curve;
      if (!groups.has(curve)) groups.set(curve, part(line, "curve"));
      const group = groups.get(curve), placed = line.points.map((point, i) => ({ ...where(point), line, level: line.levels && line.levels[i] }));
      if (line.width) make("path", { d: path(placed), fill: "none", stroke: line.color, "stroke-width": 1.04 * line.width, "stroke-dasharray": dashes(line) }, group);
      line.reach.forEach(([low, high], i) => make("path", { d: `M${placed[i].x} ${y.at(low)}V${y.at(high)}`, stroke: line.color }, group));
      if (line.marker) for (const p of placed) if (p.y !== null) marker(group, line, p.x, p.y, line.mark / 1.2);
      points.push(...placed);
    }
    return { svg, box, points, width };
  }
  function wrap(text, chars) {
    const lines = [""];
    for (const word of text.split(/\s+/)) {
      if (lines[lines.length - 1] && lines[lines.length - 1].length + word.length + 1 > chars) lines.push("");
      lines[lines.length - 1] = `${lines[lines.length - 1]} ${word}`.trim();
    }
    return lines;
  }

  // The colours of a legend, each before or in its name.
  function keys(host, entries) {
    if (!entries.length) return;
    const legend = html("p", host, undefined, "keys");
    for (const { color, name, ink, what } of entries) {
      const key = html("span", legend);
      if (what) key.title = what;
      if (ink) key.style.color = ink;
      else html("i", key).style.background = color;
      key.append(name);
    }
  }
  // Every figure of the page that has no controls, in the width that it has or in that of the paper.
  function draw(paper) {
    for (const host of document.querySelectorAll(".figure")) {
      const spec = JSON.parse(host.querySelector("script").textContent), whole = paper || host.closest("section").clientWidth;
      host.querySelectorAll(":scope > :not(script)").forEach((node) => node.remove());
      keys(host, spec.keys.map(([name, color, what]) => ({ name, color, what })));
      for (const row of spec.rows) {
        const columns = Math.max(1, Math.min(row.length, Math.floor(whole / LEAST_WIDTH))), line = html("div", host, undefined, "row");
        line.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
        for (const panel of row) {
          const figure = html("figure", line), width = Math.min(MOST_WIDTH, (whole - GAP * (columns - 1)) / columns);
          figure.style.maxWidth = `${width}px`;
          if (panel.title) html("h3", figure, panel.title);
          figure.append(paint(panel, width, PX_PER_IN * panel.height_in).svg);
          if (panel.legend) keys(figure, panel.lines.filter((each) => each.label).map((each) => ({ name: each.label, ink: each.color })));
        }
      }
    }
  }
  // On a new width, and on paper; ``again`` draws in a width.
  function redraw(again) {
    let width = document.body.clientWidth;
    addEventListener("resize", () => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; again(); } });
    addEventListener("beforeprint", () => { for (const node of document.querySelectorAll("details")) node.open = true; again(690); });
    addEventListener("afterprint", () => again());
  }
  return { make, html, paint, marker, draw, redraw };
})();

figures.draw();
figures.redraw(figures.draw);
