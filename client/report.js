// Draws the page of a load test from DATA, the result document. Plain SVG; loads nothing.
"use strict";

const requests = DATA.requests;
const ok = requests.filter((r) => r.code === "OK" && r.times.length);
const span = Math.max(DATA.duration, ...requests.map((r) => r.ended));
const main = document.getElementById("main");
const tip = document.getElementById("tip");
const css = (name) => `var(--${name})`;

function el(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "line", "text", "circle", "polyline"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "tip") hover(node, value); else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function hover(node, text) {
  node.addEventListener("mousemove", (event) => {
    tip.textContent = typeof text === "function" ? text(event) : text;
    tip.style.opacity = 1;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${left}px`; tip.style.top = `${event.clientY + 14}px`;
  });
  node.addEventListener("mouseleave", () => { tip.style.opacity = 0; });
}

const number = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const short = (value) => value === 0 ? "0" : Math.abs(value) >= 10000 ? `${number(value / 1000, 0)}k` :
  Math.abs(value) >= 100 ? number(value, 0) : Math.abs(value) >= 10 ? String(+value.toFixed(1)) : String(+value.toPrecision(2));
const ms = (value) => value === null ? "–" : value >= 10000 ? `${number(value / 1000, 1)} s` : `${number(value, value < 100 ? 1 : 0)} ms`;

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(+at.toPrecision(12));
  return found;
}

function quantile(sorted, share) {
  const at = (sorted.length - 1) * share, low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

// A frame with axes; x and y are maps from data to pixels.
function frame(width, height, xs, ys, xUnit, yUnit) {
  const left = 44, right = 10, top = 12, bottom = 30;
  const x = (value) => left + (value - xs[0]) / (xs[1] - xs[0] || 1) * (width - left - right);
  const y = (value) => height - bottom - (value - ys[0]) / (ys[1] - ys[0] || 1) * (height - top - bottom);
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const value of ticks(ys[0], ys[1], 4)) {
    svg.append(el("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      el("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of ticks(xs[0], xs[1], width / 90)) {
    svg.append(el("text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, short(value)));
  }
  svg.append(el("line", { class: "axis", x1: left, x2: width - right, y1: y(ys[0]), y2: y(ys[0]) }),
    el("text", { x: width - right, y: height - 2, "text-anchor": "end" }, xUnit),
    el("text", { x: left - 6, y: 6, "text-anchor": "end" }, yUnit));
  return { svg, x, y };
}

function section(title, says, ...content) {
  return el("section", {}, el("h2", {}, title), el("p", { class: "says" }, says), ...content);
}

function histogram(name, title, values) {
  if (!values.length) return section(title, "no samples");
  const sorted = Float64Array.from(values).sort();
  const p = { p50: quantile(sorted, 0.5), p90: quantile(sorted, 0.9), p99: quantile(sorted, 0.99) };
  const high = Math.max(p.p99 + (p.p99 - sorted[0]) * 0.15, p.p50 * 1.02, sorted[0] + 1e-6);
  const low = sorted[0] > high * 0.5 ? sorted[0] - (high - sorted[0]) * 0.1 : 0;
  const bins = Math.max(8, Math.min(44, Math.ceil(Math.sqrt(values.length) * 2)));
  const counts = new Array(bins).fill(0);
  let beyond = 0;
  for (const value of sorted) {
    if (value > high) { beyond += 1; continue; }
    counts[Math.min(bins - 1, Math.floor((value - low) / (high - low) * bins))] += 1;
  }
  const { svg, x, y } = frame(540, 200, [low, high], [0, Math.max(...counts)], "ms", "");
  counts.forEach((count, bin) => {
    const from = low + (high - low) * bin / bins, to = low + (high - low) * (bin + 1) / bins;
    svg.append(el("rect", { x: x(from) + 0.5, width: Math.max(1, x(to) - x(from) - 1), y: y(count), height: y(0) - y(count),
      rx: 1.5, fill: css("run"), tip: `${ms(from)} to ${ms(to)}\n${count} samples` }));
  });
  let lastX = -1e9, row = 0;
  for (const [label, value] of Object.entries(p)) {
    row = x(value) - lastX < 34 ? row + 1 : 0; lastX = x(value);
    svg.append(el("line", { x1: x(value), x2: x(value), y1: 6, y2: y(0), stroke: css("mark"), "stroke-dasharray": "3 3", opacity: 0.55 }),
      el("text", { x: x(value) + 4, y: 12 + row * 13, class: "strong" }, label));
  }
  const tail = beyond ? `, ${beyond} beyond the right edge (longest ${ms(sorted[sorted.length - 1])})` : "";
  return section(title, `median ${ms(p.p50)}, p90 ${ms(p.p90)}, p99 ${ms(p.p99)}${tail}`, svg);
}

function steps(changes) { // [[time, change]...] -> [[time, level]...]
  changes.sort((a, b) => a[0] - b[0]);
  let level = 0;
  const found = [[0, 0]];
  for (const [time, change] of changes) { found.push([time, level]); level += change; found.push([time, level]); }
  found.push([span, level]);
  return found;
}

function key(...entries) {
  return el("div", { class: "key" }, ...entries.map(([name, colour]) =>
    el("span", {}, el("i", { style: `background:${css(colour)}` }), name)));
}

function timeline() {
  const first = (r) => r.times.length ? r.times[0] : r.ended;
  const running = steps(requests.flatMap((r) => [[first(r), 1], [r.ended, -1]]));
  const all = steps(requests.flatMap((r) => [[r.sent, 1], [r.ended, -1]]));
  const { svg, x, y } = frame(1120, 220, [0, span], [0, Math.max(1, ...all.map((point) => point[1]))], "seconds", "requests");
  const area = (points) => `M${x(0)},${y(0)}` + points.map(([t, v]) => `L${x(t).toFixed(1)},${y(v).toFixed(1)}`).join("") + `L${x(span)},${y(0)}Z`;
  svg.append(el("path", { d: area(all), fill: css("wait"), opacity: 0.85 }), el("path", { d: area(running), fill: css("run") }));
  const at = (points, time) => { let level = 0; for (const [t, v] of points) { if (t > time) break; level = v; } return level; };
  const cover = el("rect", { x: 44, y: 0, width: 1066, height: 190, fill: "transparent" });
  hover(cover, (event) => {
    const box = cover.getBoundingClientRect(), time = (event.clientX - box.left) / box.width * span;
    return `${time.toFixed(2)} s\n${at(running, time)} running\n${at(all, time) - at(running, time)} waiting for a first token`;
  });
  svg.append(cover);
  return section("Requests in flight", "A request waits until its first token and runs until its last.",
    key(["running", "run"], ["waiting", "wait"]), svg);
}

function throughput() {
  const size = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60].find((seconds) => span / seconds <= 160) || 120;
  const bins = new Array(Math.max(1, Math.ceil(span / size))).fill(0);
  for (const r of requests) r.times.forEach((time, i) => { bins[Math.min(bins.length - 1, Math.floor(time / size))] += r.counts[i]; });
  const rates = bins.map((count, i) => count / Math.max(1e-9, Math.min(size, span - i * size)));
  const { svg, x, y } = frame(1120, 200, [0, span], [0, Math.max(1, ...rates)], "seconds", "tokens/s");
  rates.forEach((rate, i) => {
    const from = i * size, to = Math.min(span, from + size);
    svg.append(el("rect", { x: x(from), width: Math.max(1, x(to) - x(from) - 1), y: y(rate), height: y(0) - y(rate),
      fill: css("run"), opacity: 0.9, tip: `${from.toFixed(2)} to ${to.toFixed(2)} s\n${number(rate, 0)} tokens/s` }));
  });
  const mean = DATA.output_throughput;
  svg.append(el("line", { x1: x(0), x2: x(span), y1: y(mean), y2: y(mean), stroke: css("mark"), "stroke-dasharray": "3 3", opacity: 0.6 }),
    el("text", { x: x(span), y: y(mean) - 5, "text-anchor": "end", class: "strong" }, `mean ${number(mean, 0)}`));
  return section("Output over time", `Tokens that arrived, in steps of ${size} s.`, svg);
}

function slowest() {
  const shown = [...ok].sort((a, b) => (b.times.at(-1) - b.sent) - (a.times.at(-1) - a.sent)).slice(0, 20);
  if (!shown.length) return null;
  const row = 19, height = shown.length * row + 44;
  const { svg, x } = frame(1120, height, [0, span], [0, 1], "seconds", "");
  svg.querySelectorAll("text").forEach((text) => { if (text.getAttribute("text-anchor") === "end" && +text.getAttribute("x") < 44) text.remove(); });
  svg.querySelectorAll(".grid").forEach((line) => line.remove());
  shown.forEach((r, i) => {
    const y = 8 + i * row, first = r.times[0], last = r.times.at(-1);
    const words = `request ${r.id}\nsent at ${r.sent.toFixed(2)} s\nfirst token after ${ms((first - r.sent) * 1000)}\nlast token after ${ms((last - r.sent) * 1000)}\n${r.prompt_tokens} prompt tokens, ${r.completion_tokens} generated\nqueued ${ms(r.queue_ms)}`;
    const bar = (from, to, colour) => el("rect", { x: x(from), width: Math.max(1.5, x(to) - x(from)), y, height: row - 5, rx: 2, fill: css(colour), tip: words });
    svg.append(bar(r.sent, first, "wait"), bar(first, last, "run"),
      el("text", { x: 38, y: y + 11, "text-anchor": "end" }, String(r.id).slice(0, 7)));
    const inside = x(last) < 1050 || x(r.sent) < 110;
    svg.append(el("text", { x: inside ? x(last) + 6 : x(r.sent) - 6, y: y + 11, "text-anchor": inside ? "start" : "end" },
      ms((last - r.sent) * 1000)));
  });
  return section("The slowest requests", "By time to the last token; hover for the details of one.",
    key(["until the first token", "wait"], ["until the last", "run"]), svg);
}

function scatter() {
  const limit = (DATA.goodput || {}).ttft;
  const values = ok.map((r) => (r.times[0] - r.sent) * 1000);
  if (!values.length) return null;
  const { svg, x, y } = frame(1120, 220, [0, span], [0, Math.max(...values, limit || 0) * 1.05], "seconds (sent)", "ms");
  if (limit) svg.append(el("line", { x1: x(0), x2: x(span), y1: y(limit), y2: y(limit), stroke: css("bad"), "stroke-dasharray": "4 3" }),
    el("text", { x: x(span), y: y(limit) - 5, "text-anchor": "end" }, `goal ${limit} ms`));
  ok.forEach((r, i) => svg.append(el("circle", { cx: x(r.sent), cy: y(values[i]), r: 3.2, fill: css("run"), "fill-opacity": 0.6,
    tip: `request ${r.id}\n${r.prompt_tokens} prompt tokens\nfirst token after ${ms(values[i])}` })));
  requests.filter((r) => r.code !== "OK").forEach((r) => svg.append(el("path", { d: `M${x(r.sent) - 4},${y(0) - 9}l8,8m0,-8l-8,8`,
    stroke: css("bad"), "stroke-width": 2, tip: `request ${r.id}\n${r.code}: ${r.error}` })));
  return section("Time to first token, by when it was sent", "A trend upwards means that requests arrive faster than they are served." +
    (DATA.failed ? " Crosses are failures." : ""), svg);
}

function figuresTable() {
  const rows = [["TTFT", "ttft"], ["TPOT", "tpot"], ["ITL", "itl"], ["E2EL", "e2el"], ["gap per token", "token_gap"],
    ["TTFT from intended start", "ttft_intended"], ["E2EL from intended start", "e2el_intended"]];
  const statistics = ["mean", "median", "p90", "p99"];
  const head = el("tr", {}, el("th", {}, "ms"), ...statistics.map((name) => el("th", {}, name)));
  const body = rows.filter(([, name]) => DATA[`mean_${name}_ms`] !== null).map(([title, name]) => el("tr", {}, el("td", {}, title),
    ...statistics.map((statistic) => el("td", {}, number(DATA[`${statistic}_${name}_ms`], 2)))));
  return section("Latencies", "Definitions as in vllm bench serve: TPOT = (E2EL - TTFT) / (tokens - 1); ITL is the gap between messages.",
    el("table", {}, head, ...body));
}

function facts() {
  const client = DATA.client;
  const rows = [["model", DATA.model_id], ["dtype, tp", `${DATA.server.dtype || "?"}, ${DATA.server.tp || "?"}`], ["fingerprint", DATA.server.fingerprint || "?"],
    ["requests", `${DATA.completed} ended well, ${DATA.failed} failed`],
    ["load", DATA.max_concurrency ? `closed loop, ${DATA.max_concurrency} at a time` : DATA.request_rate ? `open loop, ${DATA.request_rate} requests/s, burstiness ${DATA.burstiness}` : "the workload's own arrivals"],
    ["tokens", `${number(DATA.total_input_tokens, 0)} prompt (${number(DATA.total_cached_tokens, 0)} cached), ${number(DATA.total_output_tokens, 0)} generated`],
    ["most at once", `${DATA.max_concurrent_requests} requests, ${number(DATA.max_output_tokens_per_s, 0)} tokens in a second`],
    ["client", `${client.processes} process${client.processes > 1 ? "es" : ""}, ${number(client.cpu_share * 100, 0)} % of a core, timers ${number(client.p99_lag_ms, 1)} ms late at p99`]];
  return section("The run", DATA.date + (DATA.label ? `, ${DATA.label}` : ""),
    el("table", {}, ...rows.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, String(value))))));
}

function warnings() {
  const said = Object.entries(DATA.errors).map(([code, count]) => `${count} requests failed with ${code}`);
  if (DATA.client.bottleneck) said.push("The client was the bottleneck: its latencies are too long. Use more client processes.");
  if (DATA.client.starved) said.push(`The client's machine was busy: timers were ${number(DATA.client.p99_lag_ms, 0)} ms late at p99, which is in every latency.`);
  if (DATA.interrupted) said.push("The run was interrupted; these are the requests that had ended.");
  return said.length ? el("section", { class: "warn" }, ...said.map((line) => el("div", {}, line))) : null;
}

function cards() {
  const shown = [[number(DATA.output_throughput, 0), "output tokens/s"], [number(DATA.request_throughput, 2), "requests/s"]];
  if (DATA.request_goodput !== null) shown.push([`${number(DATA.good_share * 100, 1)} %`, "kept the goal: " + Object.entries(DATA.goodput).map(([name, limit]) => `${name} ${limit} ms`).join(", ")]);
  shown.push([ms(DATA.median_ttft_ms), `TTFT median; p99 ${ms(DATA.p99_ttft_ms)}`], [ms(DATA.median_tpot_ms), `TPOT median; p99 ${ms(DATA.p99_tpot_ms)}`],
    [ms(DATA.median_e2el_ms), `E2EL median; p99 ${ms(DATA.p99_e2el_ms)}`]);
  return el("div", { class: "cards" }, ...shown.map(([value, name]) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, name))));
}

const gaps = ok.flatMap((r) => r.times.slice(1).map((time, i) => (time - r.times[i]) * 1000));
const tpot = ok.filter((r) => r.completion_tokens > 1).map((r) => (r.times.at(-1) - r.times[0]) / (r.completion_tokens - 1) * 1000);
main.append(...[
  el("h1", {}, `${DATA.model_id} under load`),
  el("p", { class: "about" }, `${DATA.num_prompts} requests in ${number(DATA.duration, 1)} s`),
  warnings(), cards(), timeline(), throughput(),
  el("div", { class: "pair" },
    histogram("ttft", "Time to first token (TTFT)", ok.map((r) => (r.times[0] - r.sent) * 1000)),
    histogram("tpot", "Time per output token (TPOT)", tpot),
    histogram("itl", "Gap between messages (ITL)", gaps),
    histogram("e2el", "Time to last token (E2EL)", ok.map((r) => (r.times.at(-1) - r.sent) * 1000))),
  el("div", { class: "pair" }, figuresTable(), facts()),
  scatter(), slowest(),
].filter((node) => node !== null));
