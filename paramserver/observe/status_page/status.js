"use strict";
// Draws /status.json and /history.json. Users choose the names, so they enter the page only as text (textContent).

const REFRESH_MS = 2000;
const MAX_POINTS = 360;
const MAX_SERIES = 4;
const SVG = "http://www.w3.org/2000/svg";
let history = { columns: [], points: [] };

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function count(value) {
  return value === null || value === undefined ? "" : Math.round(value).toLocaleString("en");
}

function short(value, units, base) {
  if (value === null || value === undefined) return "";
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)}${units[unit]}`;
}

const bytes = (value) => short(value, [" B", " KiB", " MiB", " GiB", " TiB"], 1024);
const amount = (value) => short(value, ["", " k", " M", " G"], 1000);

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value >= 86400) return `${(value / 86400).toFixed(1)} d`;
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 60) return `${(value / 60).toFixed(1)} min`;
  return value >= 10 || value === 0 ? `${Math.round(value)} s` : `${value.toFixed(2)} s`;
}

function ago(micros, now_s) {
  return micros ? `${seconds(Math.max(now_s - micros / 1e6, 0))} ago` : "never";
}

/* Each column is [title, function of a row, is a number]. */
function fill(id, columns, rows, empty, isBad) {
  const head = element("tr");
  for (const [title, , isNumber] of columns) head.append(element("th", title, isNumber ? "number" : ""));
  const body = rows.map((row) => {
    const line = element("tr", undefined, isBad && isBad(row) ? "bad" : "");
    for (const [, show, isNumber] of columns) line.append(element("td", show(row), isNumber ? "number" : "name"));
    return line;
  });
  if (!rows.length) {
    const cell = element("td", empty);
    cell.colSpan = columns.length;
    const line = element("tr");
    line.append(cell);
    body.push(line);
  }
  document.getElementById(id).replaceChildren(head, ...body);
}

function showProblems(problems) {
  const items = problems.map((problem) => {
    const item = element("li", undefined, problem.severity);
    item.append(element("strong", `${problem.severity}: ${problem.text}`), element("span", problem.advice));
    return item;
  });
  if (!items.length) items.push(element("li", "None.", "none"));
  document.getElementById("problems").replaceChildren(...items);
}

function showTables(status) {
  const of = (name) => (shard) => shard[name];
  const inDetail = (name) => (shard) => (shard.detail ? shard.detail[name] : null);
  fill("shards", [
    ["shard", of("shard"), true],
    ...(status.node ? [["node", (s) => s.node || ""]] : []),
    ["address", (s) => (s.error ? `${s.address}: ${s.error}` : s.address)],
    ["up", (s) => seconds(s.uptime_s), true],
    ["log seq", (s) => count(s.log_seq), true],
    ["applied", (s) => count(s.applied_seq), true],
    ["lag", (s) => seconds(inDetail("apply_lag_s")(s)), true],
    ["rows written", (s) => count(s.num_rows_written), true],
    ["connections", (s) => count(s.num_connections), true],
    ["in flight", (s) => bytes(s.inflight_bytes), true],
    ["log", (s) => bytes(inDetail("log_size_bytes")(s)), true],
    ["store", (s) => bytes(inDetail("store_bytes")(s)), true],
    ["memory", (s) => bytes(inDetail("memory_bytes")(s)), true],
    ["refused", (s) => count(s.num_refused), true],
    ["restarts", (s) => count(s.num_restarts), true],
  ], status.shards, "None.", (s) => s.error);
  fill("tables", [
    ["table", (t) => t.fqn],
    ["rows", (t) => count(t.num_rows_estimate), true],
    ["of", (t) => (t.num_rows ? count(t.num_rows) : "any"), true],
    ["dim", (t) => count(t.dim), true],
    ["dtype", (t) => t.dtype],
    ["states", (t) => t.states],
  ], status.tables, "No tables yet.");
  fill("dense", [
    ["dense part of", (d) => d.model],
    ["tensors", (d) => count(d.num_tensors), true],
    ["size", (d) => bytes(d.size_bytes), true],
    ["owner", (d) => d.owner],
  ], status.dense, "No dense parts.");
  fill("writers", [
    ["run", (w) => w.run],
    ["client", (w) => w.client],
    ["epoch", (w) => count(w.epoch), true],
    ["step", (w) => (w.step < 0 ? "none" : count(w.step)), true],
    ["age", (w) => seconds(w.age_s), true],
    ["cost", (w) => (w.cost_percent === null ? "" : `${w.cost_percent.toFixed(1)} %`), true],
    ["bound by", (w) => (w.cost_percent === null ? "" : w.is_cost_bound ? "max_cost_percent" : "freshness_s")],
    ["", (w) => (w.is_connected ? "connected" : w.has_ended ? "ended" : "away")],
  ], status.writers, "No writers yet.");
  fill("followers", [
    ["follower", (f) => f.name || "unnamed"],
    ["address", (f) => f.address],
    ["shard", (f) => count(f.shard), true],
    ["behind", (f) => (f.records_behind ? `${count(f.records_behind)} record${f.records_behind === 1 ? "" : "s"}` : "current"), true],
    ["age", (f) => seconds(f.age_s), true],
  ], status.followers, "No replica, follower or standby is connected.");
  fill("expiry", [
    ["shard", of("shard"), true],
    ["expiry", (s) => (s.expiry.is_running ? "running" : "idle")],
    ["runs", (s) => count(s.expiry.num_runs), true],
    ["failed", (s) => count(s.expiry.num_failed), true],
    ["rows scanned", (s) => count(s.expiry.num_rows_scanned), true],
    ["rows deleted", (s) => count(s.expiry.num_rows_expired), true],
    ["last run", (s) => ago(s.expiry.last_run_us, status.time_s), true],
  ], status.shards.filter((s) => s.expiry), "No shard answers.", (s) => s.expiry.num_failed);
  fill("archive", [
    ["shard", of("shard"), true],
    ["archived", (s) => (s.archive.archived_seq < 0 ? "unknown" : count(s.archive.archived_seq)), true],
    ["behind", (s) => bytes(s.archive.behind_bytes), true],
    ["since", (s) => seconds(s.archive.behind_s), true],
    ["failures", (s) => count(s.archive.num_failures), true],
    ["lost records", (s) => count(s.archive.num_lost), true],
    ["", (s) => s.archive.error || ""],
  ], status.shards.filter((s) => s.archive), "No archive.", (s) => s.archive.error);
  const made = status.snapshot;
  document.getElementById("snapshot").textContent = made
    ? `Newest snapshot: ${made.name}, step ${count(made.step)}, ${bytes(made.size_bytes)}, ${ago(made.created_us, status.time_s)}.`
    : "No snapshot yet.";
}

/* One line per shard, or the sum of many shards. A counter that falls belongs to a restarted process. */
function linesOf(name, isRate) {
  const place = history.columns.indexOf(name);
  const shards = new Map();
  let last = new Map();
  history.points.forEach((point, index) => {
    const now = new Map();
    for (const row of point.shards) {
      const value = row[place];
      if (value === null || value === undefined) continue;
      now.set(row[0], [value, point.time_s]);
      const before = last.get(row[0]);
      let shown = value;
      if (isRate) {
        if (!before || before[0] > value || before[1] >= point.time_s) continue;
        shown = (value - before[0]) / (point.time_s - before[1]);
      }
      if (!shards.has(row[0])) shards.set(row[0], []);
      shards.get(row[0]).push([index, shown]);
    }
    last = now;
  });
  if (shards.size <= MAX_SERIES) return [...shards.values()];
  const sums = new Map();
  for (const line of shards.values()) for (const [x, y] of line) sums.set(x, (sums.get(x) || 0) + y);
  return [[...sums.entries()].sort((a, b) => a[0] - b[0])];
}

function svg(width) {
  const made = document.createElementNS(SVG, "svg");
  made.setAttribute("viewBox", `0 0 ${width} 100`);
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("aria-hidden", "true");
  return made;
}

function path(line, className) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("d", line);
  made.setAttribute("class", className);
  return made;
}

function figure(title, value, drawing, left, right) {
  const made = element("figure");
  const caption = element("figcaption");
  caption.append(element("span", title), element("b", value));
  const axis = element("div", undefined, "axis");
  axis.append(element("span", left), element("span", right));
  made.append(caption, drawing, axis);
  return made;
}

function chart(title, name, show, isRate) {
  const lines = linesOf(name, isRate);
  const width = Math.max(history.points.length - 1, 1);
  const top = Math.max(...lines.flat().map(([, y]) => y), 0) || 1;
  const drawing = svg(width);
  drawing.append(path(`M0 99H${width}`, "base"));
  lines.forEach((line, index) => {
    const points = line.map(([x, y]) => `${x} ${(98 - 94 * (y / top)).toFixed(2)}`);
    if (points.length) drawing.append(path(`M${points.join("L")}`, `series-${index}`));
  });
  const now = lines.map((line) => (line.length ? line[line.length - 1][1] : 0));
  const total = name === "apply_lag_s" ? Math.max(...now, 0) : now.reduce((a, b) => a + b, 0);
  const highest = Math.max(...lines.flat().map(([, y]) => y), 0);
  return figure(title, show(total), drawing, `${lines.length > 1 ? "highest shard" : "highest"} ${show(highest)}`, "now");
}

/* Columns are times and rows are delays, the longest on top; a darker cell has more of its column's records. */
function delayMap(bounds) {
  const points = history.points.filter((point) => point.delay_counts.length);
  const numRows = bounds.length + 1;
  const drawing = svg(Math.max(points.length - 1, 1));
  let longest = -1;
  for (let x = 1; x < points.length; x += 1) {
    const changes = points[x].delay_counts.map((value, i) => Math.max(value - points[x - 1].delay_counts[i], 0));
    const total = changes.reduce((a, b) => a + b, 0);
    changes.forEach((value, i) => {
      if (!value) return;
      longest = Math.max(longest, i);
      const cell = document.createElementNS(SVG, "rect");
      cell.setAttribute("x", String(x - 1));
      cell.setAttribute("y", String(100 - (100 * (i + 1)) / numRows));
      cell.setAttribute("width", "1.05");
      cell.setAttribute("height", String(100 / numRows));
      cell.setAttribute("fill-opacity", String(0.2 + (0.8 * value) / total));
      drawing.append(cell);
    });
  }
  const most = longest < 0 ? "none yet" : longest < bounds.length ? `≤ ${seconds(bounds[longest])}` : `> ${seconds(bounds[longest - 1])}`;
  return figure("log to store, longest", most, drawing, `0 to ${seconds(bounds[bounds.length - 1])}, upwards`, "now");
}

function showCharts(status) {
  const detail = (status.shards.find((shard) => shard.detail) || {}).detail;
  const charts = [
    chart("rows a second", "num_rows_written", amount, true),
    chart("lag of the store", "apply_lag_s", seconds, false),
    chart("requests a second", "num_requests", amount, true),
    chart("log written a second", "log_written_bytes", bytes, true),
    chart("backlog", "backlog_bytes", bytes, false),
    chart("in flight", "inflight_bytes", bytes, false),
    chart("refused a second", "num_refused", amount, true),
    chart("processors in use", "cpu_s", (value) => value.toFixed(2), true),
  ];
  if (detail) charts.splice(2, 0, delayMap(detail.apply_delay.bounds_s));
  document.getElementById("charts").replaceChildren(...charts);
  const of = status.node ? `, shards of node ${status.node}` : "";
  document.getElementById("charts-title").textContent = `Last half hour${of}`;
  showLegend(status.shards.filter((shard) => shard.node === status.node));
}

function showLegend(shards) {
  const isSummed = shards.length > MAX_SERIES;
  const entries = (isSummed ? [{ shard: "all shards together" }] : shards).map(({ shard }, index) => {
    const entry = element("span");
    const drawing = svg(100);
    drawing.append(path("M0 50H100", `series-${index}`));
    entry.append(drawing, isSummed ? shard : `shard ${shard}`);
    return entry;
  });
  document.getElementById("legend").replaceChildren(...entries);
}

async function load(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(15000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function takePoint(newest) {
  const [point] = newest.points;
  const last = history.points[history.points.length - 1];
  history.columns = newest.columns;
  if (!point || (last && last.time_s >= point.time_s)) return;
  history.points.push(point);
  if (history.points.length > MAX_POINTS) history.points.shift();
}

async function refresh() {
  const state = document.getElementById("state");
  try {
    if (!history.points.length) history = await load("/history.json");
    const status = await load("/status.json");
    takePoint(status.history);
    document.getElementById("server").textContent =
      `server ${status.server_id || "unknown"}, version ${status.version || "unknown"}, ${status.shards.length} shard${status.shards.length === 1 ? "" : "s"}`;
    showProblems(status.problems);
    showCharts(status);
    showTables(status);
    state.textContent = `as of ${new Date(status.time_s * 1000).toLocaleTimeString("en-GB")}`;
    state.className = "";
    document.body.dataset.ready = "yes";
  } catch (error) {
    state.textContent = `the server does not answer (${error.message}); these figures are old`;
    state.className = "lost";
  }
  setTimeout(refresh, REFRESH_MS);
}

refresh();
