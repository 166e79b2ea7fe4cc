"use strict";
// Names come from the study: they only ever enter the page as text nodes and attributes.
(async () => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }

  let D;
  try {
    const bytes = Uint8Array.from(atob($("data").textContent), (letter) => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    D = JSON.parse(await new Response(plain).text());
  } catch (error) {
    $("verdict").append(make("p", { class: "warnings" }, "The tables and figures that can be changed need a browser of 2023 or later."));
    return;
  }

  // ------------------------------------------------------------------------------------------ common

  const points = (value) => (value === null || Number.isNaN(value) ? "–" : (100 * value).toFixed(2));
  const percent = (value) => (value === null || Number.isNaN(value) ? "–" : `${points(value)}\u00a0%`);
  const mean = (values) => (values.length && values.every((v) => v !== null) ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const metricOf = (key) => D.metrics.find((metric) => metric.key === key);
  const arrow = (metric) => (metric.higher ? "↑" : "↓");
  const M = D.methods.length, S = D.sets.length, F = D.draws.length;
  const cellAt = (e, m, s) => (e * M + m) * S + s;
  const groups = [...new Set(D.sets.map((set) => set.group))];

  function options(select, names, chosen = 0) {
    select.replaceChildren(...names.map((name, at) => make("option", { value: at }, name)));
    select.value = chosen;
  }
  function exposures(select) {
    options(select, D.exposures);
    select.closest("label").hidden = D.exposures.length < 2;
  }
  function short(text, length) {
    const letters = Array.from(text);
    return letters.length > length ? `${letters.slice(0, length - 1).join("")}…` : text;
  }

  // ------------------------------------------------------------------------------------------ results

  const sorting = { column: "order", descending: false };

  function columnsOf(means, exposure) {
    const chosen = $("group").value === "all" ? groups : [groups[Number($("group").value)]];
    const cell = (m, s) => means[cellAt(exposure, m, s)];
    const sets = (group) => D.sets.map((set, s) => s).filter((s) => D.sets[s].group === group);
    const average = (title, span, key) => ({ title, key, average: true, value: (m) => mean(span.map((s) => cell(m, s))) });
    const grouped = groups.length > 1;
    const parts = chosen.map((group) => {
      const own = sets(group);
      const each = own.map((s) => ({ title: D.sets[s].name, key: `set${s}`, set: s, value: (m) => cell(m, s) }));
      const last = own.length > 1 && grouped ? [average("average", own, `group:${group}`)] : [];
      return { title: group, columns: [...each, ...last] };
    });
    const all = chosen.flatMap(sets);
    return [{ title: "", columns: [average("average", all, "average")] }, ...parts];
  }

  function showResults() {
    const metric = metricOf(D.metrics[Number($("metric").value)].key);
    const exposure = Number($("exposure").value);
    const { mean: means, half } = D.means[metric.key];
    const parts = columnsOf(means, exposure);
    const columns = parts.flatMap((part) => part.columns);
    const wanted = $("filter").value.trim().toLowerCase();
    let rows = D.order.filter((m) => D.methods[m].name.toLowerCase().includes(wanted));
    if ($("only-best").checked) rows = rows.filter((m) => D.methods[m].mark);
    const ranges = columns.map((column) => {
      const values = D.order.map(column.value).filter((v) => v !== null);
      return [Math.min(...values), Math.max(...values)];
    });
    sortRows(rows, columns);
    $("results-table").tHead.replaceChildren(...heading(parts, metric));
    $("results-table").tBodies[0].replaceChildren(...rows.map((m) => resultRow(m, parts, ranges, metric, exposure, half)));
    const noun = M === 1 ? "detector" : "detectors";
    const count = rows.length === M ? `${M} ${noun}` : `${rows.length} of ${M} ${noun}`;
    $("results-note").textContent = `${count}. ${metric.label} in per cent, ${metric.higher ? "higher" : "lower"} is better. A dash is a missing value; no average is taken over it.`;
  }

  function sortRows(rows, columns) {
    const column = columns.find((one) => one.key === sorting.column);
    const sign = sorting.descending ? -1 : 1;
    if (sorting.column === "name") {
      rows.sort((a, b) => sign * D.methods[a].name.localeCompare(D.methods[b].name));
    } else if (column) {
      const key = (m) => column.value(m);
      rows.sort((a, b) => (key(a) === null) - (key(b) === null) || sign * (key(a) - key(b)));
    } else {
      sorting.column = "order";
      if (sorting.descending) rows.reverse();
    }
  }

  // Where a group begins there is a rule; averages are set apart from sets.
  const kind = (part, column) => `${column === part.columns[0] ? "first" : ""} ${column.average ? "average" : ""}`;

  function heading(parts, metric) {
    const button = (title, key, long = false) =>
      make("button", { type: "button", title, onclick: () => sortBy(key, metric), class: long ? "long" : null }, title);
    const sorted = (key) => (sorting.column === key ? (sorting.descending ? "descending" : "ascending") : null);
    const head = [make("th", { scope: "col", "aria-sort": sorted("name") }, button("Detector", "name"))];
    for (const part of parts)
      for (const column of part.columns)
        head.push(make("th", { scope: "col", class: `num ${kind(part, column)}`, "aria-sort": sorted(column.key) }, button(column.title, column.key, true)));
    if (!parts.some((part) => part.title)) return [make("tr", {}, ...head)];
    const over = [make("td"), ...parts.map((part) => make("th", { scope: "colgroup", colspan: part.columns.length }, part.title))];
    return [make("tr", { class: "groups" }, ...over), make("tr", {}, ...head)];
  }

  function sortBy(key, metric) {
    const first = key !== "name" && metric.higher;
    sorting.descending = sorting.column === key ? !sorting.descending : first;
    sorting.column = key;
    showResults();
    $("results-table").tHead.querySelector("[aria-sort] button")?.focus();
  }

  function resultRow(m, parts, ranges, metric, exposure, half) {
    const columns = parts.flatMap((part) => part.columns.map((column) => [part, column]));
    const cells = columns.map(([part, column], at) => {
      const value = column.value(m);
      const [low, high] = ranges[at];
      const best = value !== null && value === (metric.higher ? high : low);
      const share = value === null || high === low ? 0 : (value - low) / (high - low);
      const reach = column.set === undefined ? null : half[cellAt(exposure, m, column.set)];
      const more = $("intervals").checked && column.set !== undefined ? make("small", {}, reach === null ? "" : `± ${points(reach)}`) : null;
      const text = points(value);
      return make("td", {
        class: `num ${kind(part, column)}`,
        style: `--shade:${(metric.higher ? share : 1 - share).toFixed(3)}`,
        "data-value": value,
      }, best ? make("b", {}, text) : text, more);
    });
    const link = make("a", { href: `#detector-${m}`, onclick: () => open(m) }, D.methods[m].name);
    const name = make("span", { class: "name", title: D.methods[m].name }, link);
    const mark = D.methods[m].mark ? make("span", { class: "mark" }, D.methods[m].mark) : null;
    return make("tr", { class: D.methods[m].mark ? "best" : null, "data-method": m }, make("th", { scope: "row" }, name, mark), ...cells);
  }

  function open(m) {
    $(`detector-${m}`).open = true;
  }

  // ------------------------------------------------------------------------------------------ threshold explorer

  const X = D.explorer;
  const unpacked = new Map();
  const AT_95 = X.steps.indexOf(950);
  const state = { point: { step: AT_95 }, set: 0 };

  function sums(differences) {
    let total = 0;
    return differences.map((step) => (total += step));
  }
  function entry(e, m, d, s) {
    const key = `${e},${m},${d},${s}`;
    if (!unpacked.has(key)) {
      const raw = X.entries[key];
      unpacked.set(key, raw && { n: raw.n, tn: sums(raw.t), fn: sums(raw.f), named: raw.x, bars: raw.h, place: raw.u && sums(raw.u), scale: raw.s });
    }
    return unpacked.get(key);
  }

  // (ID rows kept, OOD rows kept) at a step of the slider or at a threshold by name; null where a fold has none.
  function keptAt(one, point) {
    return point.step !== undefined ? [one.tn[point.step], one.fn[point.step]] : one.named[point.named];
  }

  function outcome(e, m, draws, s, point, cost) {
    let n = 0, N = 0, tn = 0, fn = 0;
    for (const d of draws) {
      const one = entry(e, m, d, s);
      const kept = one && keptAt(one, point);
      if (!kept) return null;
      n += one.n[0]; N += one.n[1]; tn += kept[0]; fn += kept[1];
    }
    const fp = n - tn, tp = N - fn;
    const fpr = fp / n, fnr = fn / N;
    return {
      fpr, fnr,
      f1: tp ? (2 * tp) / (2 * tp + fp + fn) : 0,
      coverage: (tn + fn) / (n + N),
      cost: (1 - cost.share) * fpr * cost.fp + cost.share * fnr * cost.fn,
      n, N,
    };
  }

  function settings() {
    const number = (id) => Math.max(0, Number($(id).value) || 0);
    const chosen = $("draw").value;
    return {
      e: Number($("explorer-exposure").value),
      m: Number($("detector").value),
      draws: X.pooled ? [0] : chosen === "all" ? D.draws.map((_, d) => d) : [Number(chosen)],
      cost: { fp: number("cost-fp"), fn: number("cost-fn"), share: Math.min(1, number("share") / 100) },
    };
  }

  const NAMED = X.alphas.map((alpha, at) => ({
    id: `alpha-${at}`, named: at, label: `conformal α = ${alpha}`,
    note: `The conformal threshold: a new in-distribution row is flagged with probability at most ${alpha}.`,
  }));
  const TEST = { id: "at-test", named: X.alphas.length, label: "@test (reference)", reference: true,
    note: "FPR = FNR on each evaluated set, so that every set has a threshold of its own. Nobody has that set when the threshold is chosen: a reference only." };
  const onSet = (s) => ({ named: X.alphas.length + 1 + s, set: s,
    note: `FPR = FNR between calibration rows and the rows of ${D.sets[s].name}, then used for all others. That set is left out of the averages.` });

  function choose(point) {
    state.point = point;
    if (point.step !== undefined) $("step").value = point.step;
    showExplorer();
  }

  function buildPoints() {
    const button = (id, label, point, reference) =>
      make("button", { type: "button", id, "aria-pressed": "false", class: reference ? "reference" : null, onclick: () => choose(point) }, label);
    const select = make("select", { id: "val-set", "aria-label": "Validation set of @val", onchange: () => choose(onSet(Number(select.value))) });
    options(select, D.sets.map((set) => short(set.name, 40)));
    const val = make("button", { type: "button", id: "at-val", "aria-pressed": "false", onclick: () => choose(onSet(Number(select.value))) }, "@val on");
    $("points").replaceChildren(
      button("at-95tnr", "@95TNR", { step: AT_95 }, false),
      ...NAMED.map((point) => button(point.id, point.label, point, false)),
      make("span", { class: "pair" }, val, select),
      button(TEST.id, TEST.label, TEST, true),
    );
  }

  function markPoints(now) {
    const press = (id, on) => $(id).setAttribute("aria-pressed", String(on));
    const possible = (point) => D.sets.some((_, s) => now.draws.every((d) => { const one = entry(now.e, now.m, d, s); return one && one.named[point.named]; }));
    press("at-95tnr", state.point.step === AT_95);
    NAMED.forEach((point) => {
      press(point.id, state.point.named === point.named);
      $(point.id).disabled = !possible(point);
      $(point.id).title = possible(point) ? "" : "Too few calibration rows for this level.";
    });
    press("at-val", state.point.set !== undefined);
    $("at-val").disabled = !possible(onSet(Number($("val-set").value)));
    $("at-val").title = $("at-val").disabled ? "Each OOD set has its own fitted detector here (outlier exposure, or parameters of its own), so that no set can lend its threshold to another." : "";
    press("at-test", state.point.named === TEST.named);
  }

  function showExplorer() {
    const now = settings();
    markPoints(now);
    const found = D.sets.map((_, s) => outcome(now.e, now.m, now.draws, s, state.point, now.cost));
    const shown = found.map((one, s) => ({ ...one, s })).filter((one, s) => found[s]);
    const counted = shown.filter((one) => one.s !== state.point.set);
    $("keep").textContent = state.point.step === undefined ? "–" : `${(X.steps[state.point.step] / 10).toFixed(1)}\u00a0%`;
    $("step").setAttribute("aria-valuetext", `keep ${(X.steps[$("step").value] / 10).toFixed(1)} per cent of the calibration rows`);
    $("point-note").textContent = state.point.note ?? (state.point.step === AT_95 ? "@95TNR: the smallest threshold that keeps at least 95 % of the calibration rows." : "");
    showTiles(counted, now);
    showOutcomes(shown, counted);
    drawScores(now);
  }

  function thresholdText(now) {
    const one = entry(now.e, now.m, now.draws[0], state.set);
    if (!one || !one.place || now.draws.length > 1 || X.pooled || state.point.step === undefined) return "one per fold";
    if (state.point.step === 0) return "−∞";
    const [low, high] = one.scale;
    return `≈ ${Number((low + (one.place[state.point.step] / X.unit) * (high - low)).toPrecision(3))}`;
  }

  function showTiles(rows, now) {
    const over = (key) => mean(rows.map((row) => row[key]));
    const fnr = rows.map((row) => row.fnr);
    const tile = (id, name, text, kind = "") => make("div", { class: `tile ${kind}` }, make("span", {}, name), make("strong", { id }, text));
    const cost = over("cost");
    $("tiles").replaceChildren(
      tile("tile-fpr", "FPR: ID rows flagged", percent(over("fpr")), "fpr"),
      tile("tile-fnr", "FNR: OOD rows missed, mean", percent(over("fnr")), "fnr"),
      tile("tile-spread", "FNR, worst − best set", fnr.length ? `${points(Math.max(...fnr) - Math.min(...fnr))} points` : "–"),
      tile("tile-cost", "Expected cost per row, mean", cost === null ? "–" : cost.toFixed(4), "cost"),
      tile("tile-threshold", "Threshold", thresholdText(now)),
    );
  }

  function showOutcomes(rows, counted) {
    const keys = ["fpr", "fnr", "f1", "coverage", "cost"];
    const text = (key, value) => (value === null ? "–" : key === "cost" ? value.toFixed(4) : points(value));
    const head = [["OOD set", ""], ["FPR %", "ID rows flagged"], ["FNR %", "OOD rows missed"], ["F1 %", "OOD positive, at the class ratio of the test rows"], ["Kept %", "coverage: test rows not flagged"], ["Cost", "per row, at the costs and the OOD share above"]];
    const table = $("explorer-table");
    table.tHead.replaceChildren(make("tr", {}, ...head.map(([name, title], at) => make("th", { scope: "col", class: at ? "num" : null, title }, name))));
    table.tBodies[0].replaceChildren(...rows.map((row) => {
      const name = D.sets[row.s].name;
      const pick = make("button", { type: "button", title: `${name}: show its scores`, onclick: () => { state.set = row.s; showExplorer(); } }, make("span", { class: "name" }, name));
      const used = row.s === state.point.set;
      const kind = [row.s === state.set ? "chosen" : "", used ? "used" : ""].join(" ").trim();
      const cells = keys.map((key) => make("td", { class: "num", "data-key": key, "data-value": row[key] }, text(key, row[key])));
      return make("tr", { class: kind || null, "data-set": row.s }, make("th", { scope: "row" }, pick, used ? " (chosen on)" : null), ...cells);
    }));
    const averages = keys.map((key) => { const value = mean(counted.map((row) => row[key])); return make("td", { class: "num", "data-key": key, "data-value": value }, text(key, value)); });
    table.tFoot.replaceChildren(make("tr", {}, make("th", { scope: "row" }, "mean"), ...averages));
  }

  function drawScores(now) {
    const ones = now.draws.map((d) => entry(now.e, now.m, d, state.set));
    const box = $("explorer-chart");
    if (ones.some((one) => !one || !one.bars)) {
      box.replaceChildren();
      $("explorer-caption").textContent = "No picture: these scores are constant on the calibration rows, or a fold has none.";
      return;
    }
    const add = (side) => ones.map((one) => one.bars[side]).reduce((a, b) => a.map((v, i) => v + b[i]));
    const inside = add(0), outside = add(1);
    const places = state.point.step === undefined ? [] : ones.map((one) => one.place[state.point.step] / X.unit);
    const width = Math.max(260, box.clientWidth), left = 34, right = 8, height = 150, gap = 34;
    const x = (u) => left + u * (width - left - right);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${2 * height + gap + 34}`, height: 2 * height + gap + 34, role: "img", "aria-label": "Scores of ID and OOD rows, and both error rates against the threshold" });
    svg.append(...histogram(inside, outside, x, height), ...errorCurves(inside, outside, x, height + gap, height));
    const one = ones[0], single = ones.length === 1 && !X.pooled;
    const label = (u) => (single ? Number((one.scale[0] + u * (one.scale[1] - one.scale[0])).toPrecision(3)) : u);
    for (const u of [0, 0.25, 0.5, 0.75, 1])
      svg.append(draw("text", { x: x(u), y: 2 * height + gap + 16, "text-anchor": u === 0 ? "start" : u === 1 ? "end" : "middle" }, String(label(u))));
    if (places.length) svg.append(...thresholdLines(places, x, 2 * height + gap));
    else svg.append(draw("text", { x: x(0.5), y: 12, "text-anchor": "middle" }, ""));
    dragging(svg, ones, x);
    box.replaceChildren(svg);
    const set = D.sets[state.set].name;
    const areas = areasOf(now);
    $("explorer-caption").textContent = `${short(D.methods[now.m].name, 40)} on ${short(set, 40)}: ID rows grey, OOD rows blue; below, FPR and FNR against the threshold${areas}. ${single ? "Scores" : "Each fold's scores, scaled so that its calibration rows fill the left half"}; higher is more OOD, both ends clipped. Drag the line.`;
  }

  function areasOf(now) {
    const area = (key) => D.means[key] && D.means[key].mean[cellAt(now.e, now.m, state.set)];
    const named = [["autc", "AUTC"], ["aufpr", "AUFPR"], ["aufnr", "AUFNR"]].filter(([key]) => area(key) !== undefined && area(key) !== null);
    return named.length ? ` (${named.map(([key, name]) => `${name} ${percent(area(key))}`).join(", ")}, mean of the folds)` : "";
  }

  function histogram(inside, outside, x, height) {
    const total = (bars) => bars.reduce((a, b) => a + b, 0);
    const shares = [inside, outside].map((bars) => bars.map((v) => v / total(bars)));
    const top = Math.max(...shares[0], ...shares[1]);
    const y = (v) => height - (v / top) * (height - 16);
    const outline = (bars) => bars.map((v, i) => `L${x(i / X.bins)} ${y(v)}L${x((i + 1) / X.bins)} ${y(v)}`).join("");
    const path = (bars) => `M${x(0)} ${height}${outline(bars)}L${x(1)} ${height}`;
    return [
      draw("path", { d: path(shares[0]), fill: "var(--id)", "fill-opacity": 0.35, stroke: "var(--id)", "stroke-width": 1 }),
      draw("path", { d: path(shares[1]), fill: "var(--fnr)", "fill-opacity": 0.16, stroke: "var(--fnr)", "stroke-width": 1.6 }),
      draw("line", { x1: x(0), x2: x(1), y1: height, y2: height, stroke: "var(--line)" }),
      draw("text", { x: 0, y: 10 }, "rows"),
    ];
  }

  function errorCurves(inside, outside, x, top, height) {
    const upto = (bars) => { const total = bars.reduce((a, b) => a + b, 0); return [0, ...sums(bars)].map((v) => v / total); };
    const fpr = upto(inside).map((v) => 1 - v), fnr = upto(outside);
    const y = (v) => top + (1 - v) * height;
    const line = (curve) => curve.map((v, i) => `${i ? "L" : "M"}${x(i / X.bins)} ${y(v)}`).join("");
    const area = (curve) => `${line(curve)}L${x(1)} ${y(0)}L${x(0)} ${y(0)}Z`;
    const ticks = [0, 0.5, 1].map((v) => draw("text", { x: 28, y: y(v) + 4, "text-anchor": "end" }, `${100 * v}\u202f%`));
    const grid = [0, 0.5, 1].map((v) => draw("line", { x1: x(0), x2: x(1), y1: y(v), y2: y(v), stroke: "var(--line)" }));
    const one = (curve, colour, dash) => [
      draw("path", { d: area(curve), fill: colour, "fill-opacity": 0.12 }),
      draw("path", { d: line(curve), fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }),
    ];
    return [...grid, ...ticks, ...one(fpr, "var(--fpr)", null), ...one(fnr, "var(--fnr)", "6 3"),
      draw("text", { x: x(0) + 4, y: top - 6, class: "ink" }, "FPR solid, FNR dashed")];
  }

  function thresholdLines(places, x, bottom) {
    const [low, high] = [Math.min(...places), Math.max(...places)];
    const middle = [...places].sort((a, b) => a - b)[Math.floor(places.length / 2)];
    return [
      draw("rect", { x: x(low), width: Math.max(0, x(high) - x(low)), y: 0, height: bottom, fill: "var(--ink)", "fill-opacity": 0.07 }),
      draw("line", { x1: x(middle), x2: x(middle), y1: 0, y2: bottom, stroke: "var(--ink)", "stroke-width": 1.5 }),
      draw("circle", { cx: x(middle), cy: 6, r: 6, fill: "var(--ink)" }),
    ];
  }

  function dragging(svg, ones, x) {
    svg.classList.add("draggable");
    const place = (event) => {
      const now = $("explorer-chart").firstElementChild;  // the picture is drawn anew while it is dragged
      const box = now.getBoundingClientRect();
      const u = ((event.clientX - box.left) / box.width * now.viewBox.baseVal.width - x(0)) / (x(1) - x(0));
      const middle = X.steps.map((_, i) => ones.map((one) => one.place[i]).sort((a, b) => a - b)[Math.floor(ones.length / 2)] / X.unit);
      const step = middle.reduce((best, v, i) => (Math.abs(v - u) < Math.abs(middle[best] - u) ? i : best), 1);
      choose({ step });
    };
    svg.addEventListener("pointerdown", (down) => {
      place(down);
      const stop = () => { removeEventListener("pointermove", place); removeEventListener("pointerup", stop); removeEventListener("pointercancel", stop); };
      addEventListener("pointermove", place);
      addEventListener("pointerup", stop);
      addEventListener("pointercancel", stop);
    });
  }

  // ------------------------------------------------------------------------------------------ folds

  function showFolds() {
    const metric = D.metrics.filter((one) => D.folds[one.key])[Number($("folds-metric").value)];
    const e = Number($("folds-exposure").value), set = $("folds-set").value;
    const chosen = set === "all" ? D.sets.map((_, s) => s) : [Number(set)];
    const values = D.folds[metric.key];
    const rows = D.order.map((m) => {
      const dots = D.draws.map((_, d) => mean(chosen.map((s) => values[cellAt(e, m, s) * F + d]))).filter((v) => v !== null);
      return { m, dots, middle: mean(dots) };
    }).filter((row) => row.dots.length);
    rows.sort((a, b) => (metric.higher ? b.middle - a.middle : a.middle - b.middle));
    drawStrips($("folds-chart"), rows, metric);
  }

  function drawStrips(box, rows, metric) {
    const width = Math.max(260, box.clientWidth), narrow = width < 560;
    const left = narrow ? 92 : 190, right = 16, step = 22, top = 26;
    const every = rows.flatMap((row) => row.dots);
    const [low, high] = [Math.min(...every), Math.max(...every)];
    const pad = (high - low || 0.01) * 0.04;
    const x = (v) => left + ((v - low + pad) / (high - low + 2 * pad)) * (width - left - right);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${top + rows.length * step + 8}`, height: top + rows.length * step + 8, role: "img", "aria-label": `${metric.label} of every detector in every fold` });
    for (const v of ticks(low, high, narrow ? 3 : 6))
      svg.append(draw("line", { x1: x(v), x2: x(v), y1: top - 6, y2: top + rows.length * step, stroke: "var(--line)" }), draw("text", { x: x(v), y: 12, "text-anchor": "middle" }, `${Number((100 * v).toPrecision(4))}\u202f%`));
    rows.forEach((row, at) => {
      const y = top + (at + 0.5) * step, name = D.methods[row.m].name;
      const colour = D.methods[row.m].mark ? "var(--accent)" : "var(--id)";
      const label = draw("text", { x: left - 10, y: y + 4, "text-anchor": "end", class: "ink" }, short(name, narrow ? 12 : 26));
      label.append(draw("title", {}, name));
      svg.append(label, ...row.dots.map((v) => draw("circle", { cx: x(v), cy: y, r: 4, fill: colour, "fill-opacity": 0.65 })),
        draw("line", { x1: x(row.middle), x2: x(row.middle), y1: y - 8, y2: y + 8, stroke: "var(--ink)", "stroke-width": 2 }));
    });
    box.replaceChildren(svg);
  }

  function ticks(low, high, count) {
    const span = high - low || 0.01;
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    const steps = [1, 2, 5, 10].map((k) => k * power);
    const at = (step) => {
      const found = [];
      for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(v);
      return found;
    };
    // One number alone is no scale: a finer step, if need be.
    const found = at(steps.find((k) => k >= raw));
    return found.length > 1 ? found : at(steps[Math.max(0, steps.findIndex((k) => k >= raw) - 1)]);
  }

  // ------------------------------------------------------------------------------------------ tuning

  function drawTuning(box) {
    const grid = D.tuning[box.dataset.name];
    if (!grid || box.childElementCount) return;
    const width = Math.max(240, box.clientWidth), left = Math.min(170, width * 0.45), right = 44, step = 20, top = 24;
    const valued = grid.filter((one) => one.values[0] !== null);
    const every = valued.flatMap((one) => one.values);
    const [low, high] = [Math.min(...every), Math.max(...every)];
    const x = (v) => left + ((v - low) / (high - low || 1)) * (width - left - right);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${top + grid.length * step}`, height: top + grid.length * step, role: "img", "aria-label": "Search curve" });
    if (valued.length)
      svg.append(draw("text", { x: left, y: 12 }, percent(low)), draw("text", { x: width - right, y: 12, "text-anchor": "end" }, percent(high)));
    const line = [];
    grid.forEach((one, at) => {
      const y = top + (at + 0.5) * step, [middle, least, most] = one.values;
      const label = draw("text", { x: left - 10, y: y + 4, "text-anchor": "end", class: one.chosen ? "ink" : null }, short(one.params, Math.floor(left / 7.4)));
      label.append(draw("title", {}, one.params));
      svg.append(label);
      if (middle === null) {
        const why = draw("text", { x: left, y: y + 4 }, short(`${one.status}: ${one.reason}`, Math.floor((width - left) / 7)));
        why.append(draw("title", {}, one.reason));
        svg.append(why);
        return;
      }
      line.push(`${line.length ? "L" : "M"}${x(middle)} ${y}`);
      svg.append(draw("line", { x1: x(least), x2: x(most), y1: y, y2: y, stroke: "var(--id)", "stroke-width": 2 }),
        draw("circle", { cx: x(middle), cy: y, r: one.chosen ? 5.5 : 3.5, fill: one.chosen ? "var(--accent)" : "var(--id)" }));
      if (one.chosen) svg.append(draw("text", { x: width, y: y + 4, "text-anchor": "end", class: "ink" }, `${one.chosen}×`));
    });
    svg.prepend(draw("path", { d: line.join(""), fill: "none", stroke: "var(--line)", "stroke-width": 1.5 }));
    box.append(make("p", { class: "note" }, `${grid[0].criterion.toUpperCase()} on validation rows at each point of the grid (mean, and range over the searches); blue: how often it was chosen.`), svg);
  }

  // ------------------------------------------------------------------------------------------ two detectors

  function showPair() {
    const a = Number($("pair-a").value), b = Number($("pair-b").value), P = D.pairs;
    const name = (at) => D.methods[P.methods[at]].name;
    if (a === b) { $("pair-result").textContent = "Choose two different detectors."; return; }
    const p = P.adjusted[a][b], better = P.ranks[a] < P.ranks[b];
    const gap = (100 * (P.means[a] - P.means[b])).toFixed(2);
    const text = (v) => (v < 0.0001 ? "p < 0.0001" : `p = ${v.toFixed(4)}`);
    $("pair-result").textContent = `${name(a)} ranks ${better ? "before" : "behind"} ${name(b)} by ${Math.abs(P.ranks[a] - P.ranks[b]).toFixed(2)} on average; mean difference ${gap > 0 ? "+" : ""}${gap.replace("-", "−")} points; ${text(p)} adjusted, ${text(P.unadjusted[a][b])} unadjusted.`;
  }

  // ------------------------------------------------------------------------------------------ start

  document.documentElement.dataset.ready = "1";
  options($("metric"), D.metrics.map((metric) => `${metric.label} ${arrow(metric)}`), D.metrics.findIndex((metric) => metric.key === D.primary));
  exposures($("exposure"));
  options($("group"), groups.map((group) => group || "(no group)"));
  $("group").prepend(make("option", { value: "all" }, "all"));
  $("group").value = "all";
  $("group").closest("label").hidden = groups.length < 2;
  for (const id of ["metric", "exposure", "group", "filter", "only-best", "intervals"]) $(id).addEventListener("input", showResults);

  $("detector").replaceChildren(...D.order.map((m) => make("option", { value: m }, short(D.methods[m].name, 60))));
  exposures($("explorer-exposure"));
  $("draw").replaceChildren(make("option", { value: "all" }, F > 1 ? "all folds, rows added up" : D.draws[0]), ...(F > 1 && !X.pooled ? D.draws.map((name, d) => make("option", { value: d }, name)) : []));
  Object.assign($("step"), { min: 0, max: X.steps.length - 1, step: 1, value: AT_95 });
  buildPoints();
  $("step").addEventListener("input", () => choose({ step: Number($("step").value) }));
  for (const id of ["detector", "explorer-exposure", "draw", "cost-fp", "cost-fn", "share"]) $(id).addEventListener("input", showExplorer);

  options($("folds-metric"), D.metrics.filter((metric) => D.folds[metric.key]).map((metric) => `${metric.label} ${arrow(metric)}`));
  $("folds-metric").value = D.metrics.filter((metric) => D.folds[metric.key]).findIndex((metric) => metric.key === D.primary);
  exposures($("folds-exposure"));
  options($("folds-set"), D.sets.map((set) => short(set.name, 60)));
  $("folds-set").prepend(make("option", { value: "all" }, "mean of all"));
  $("folds-set").value = "all";
  for (const id of ["folds-metric", "folds-exposure", "folds-set"]) $(id).addEventListener("input", showFolds);

  if (D.pairs) {
    const names = D.pairs.methods.map((m) => short(D.methods[m].name, 60));
    const byRank = D.pairs.ranks.map((_, at) => at).sort((a, b) => D.pairs.ranks[a] - D.pairs.ranks[b]);
    for (const [id, at] of [["pair-a", 0], ["pair-b", 1]]) {
      $(id).replaceChildren(...byRank.map((place) => make("option", { value: place }, names[place])));
      $(id).value = byRank[at];
      $(id).addEventListener("input", showPair);
    }
    showPair();
  }
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  for (const part of document.querySelectorAll(".detector")) part.addEventListener("toggle", () => part.open && drawTuning(part.querySelector(".tuning")));
  const openTarget = () => { const part = location.hash && $(location.hash.slice(1)); if (part && part.matches("details")) part.open = true; };
  addEventListener("hashchange", openTarget);
  openTarget();
  for (const button of document.querySelectorAll(".copy"))
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText($(button.dataset.copy).textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren($(button.dataset.copy));
        button.textContent = "Selected";
      }
    });
  showResults();
  showExplorer();
  showFolds();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    showFolds();
    drawScores(settings());
  });
})();
