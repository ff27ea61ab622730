// The page to play with. First the mathematics, free of the page and tested against Python
// (tests/test_book_play.py); then the drawing. No library, no network.
"use strict";

const kdaPlay = (() => {
  const T = 12, K = 8, V = 6;
  const FORMATS = {
    float32: { largest: 3.4028234663852886e38, smallest: 2 ** -126 },
    bfloat16: { largest: 3.3895313892515355e38, smallest: 2 ** -126 },
    float16: { largest: 65504, smallest: 2 ** -14 },
  };
  const BLOCK = 16; // rows that share a reference row

  // A stream of numbers from -1 to 1, the same in every browser (mulberry32).
  function stream(seed) {
    return () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let x = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
      return ((x ^ (x >>> 14)) >>> 0) / 2 ** 31 - 1;
    };
  }

  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
  const size = (a) => Math.sqrt(dot(a, a));

  // T keys [K] of length 1, and T values [V].
  function inputs() {
    const next = stream(7);
    const rows = (n) => Array.from({ length: T }, () => Array.from({ length: n }, next));
    const keys = rows(K).map((key) => key.map((x) => x / size(key)));
    return { keys, values: rows(V) };
  }

  // What a key reads: S^T k.
  const read = (state, key) => state[0].map((_, j) => dot(state.map((row) => row[j]), key));

  // The state [K][V] after `tokens` tokens; every channel of every token has the gate g.
  function stateAfter(tokens, g, beta) {
    const { keys, values } = inputs();
    let state = keys[0].map(() => values[0].map(() => 0));
    for (let t = 0; t < tokens; t++) {
      state = state.map((row) => row.map((x) => Math.exp(g) * x));
      const old = read(state, keys[t]);
      const delta = values[t].map((v, j) => beta * (v - old[j]));
      state = state.map((row, i) => row.map((x, j) => x + keys[t][i] * delta[j]));
    }
    return state;
  }

  // How far the value that a key reads is from the value stored under it, relative.
  function recallError(state, token) {
    const { keys, values } = inputs();
    const got = read(state, keys[token]);
    return size(got.map((x, j) => x - values[token][j])) / size(values[token]);
  }

  // log2 of the factors of a chunk's rows. plain: e^(-G), the key's factor where the decay
  // e^(G_i - G_j) is split with no reference row. own: e^(G), its partner. anchored: e^(G_r - G),
  // with r the first row of the block of 16.
  function factors(g, C) {
    const rows = Array.from({ length: C }, (_, i) => i);
    const G = rows.map((i) => ((i + 1) * g) / Math.LN2);
    return {
      plain: G.map((x) => -x),
      own: G,
      anchored: G.map((x, i) => G[i - (i % BLOCK)] - x),
    };
  }

  // The first row whose factor is too large for a format, or below its normal numbers; -1: none.
  const firstOverflow = (logs, format) =>
    logs.findIndex((x) => x > Math.log2(FORMATS[format].largest));
  const firstVanishing = (logs, format) =>
    logs.findIndex((x) => x < Math.log2(FORMATS[format].smallest));

  // Bytes per token and value head, in bfloat16, as chapters 4, 10 and 11 count them.
  function traffic(D, C, tokens = 8192) {
    const size = {
      q: 2 * D, k: 2 * D, v: 2 * D, g: 2 * D, beta: 2, o: 2 * D, w: 2 * D, u: 2 * D, kg: 2 * D,
      vNew: 2 * D, G: 4 * D, lastG: (4 * D) / C, A: 4 * C, h: (2 * D * D) / C,
    };
    const sum = (names) => names.split(" ").reduce((total, name) => total + size[name], 0);
    return {
      loop: 24 * D * D,
      recurrent: (8 * D * D) / tokens + 12 * D + 2,
      chunks:
        sum("g G") + sum("q k G beta A A") + sum("A A") + sum("k v beta A G w u kg") +
        sum("w u kg lastG h vNew") + sum("q vNew G A h o"),
      least: sum("q k v g beta o"),
    };
  }

  return {
    T, K, V, FORMATS, BLOCK, inputs, stateAfter, recallError, factors, firstOverflow,
    firstVanishing, traffic,
  };
})();
if (typeof window !== "undefined") window.kdaPlay = kdaPlay;

// -- the page ---------------------------------------------------------------------------------

(() => {
  const CHUNKS = [16, 32, 64, 128];
  const $ = (id) => document.getElementById(`play-${id}`);
  const number = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
  const percent = (x) => `${Math.round(100 * x)} %`;

  function svg(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function chosen() {
    return {
      g: -Number($("gate").value),
      beta: Number($("beta").value),
      token: Number($("token").value),
      C: CHUNKS[Number($("chunk").value)],
      format: $("format").value,
      D: Number($("size").value),
    };
  }

  function say(id, value) {
    $(`${id}-value`).textContent = value;
    $(id).setAttribute("aria-valuetext", value);
  }

  function drawState({ g, beta, token }) {
    const state = kdaPlay.stateAfter(token, g, beta);
    const cells = state.flatMap((row, i) => row.map((x, j) => ({ x, i, j })));
    const large = cells.reduce((a, b) => (Math.abs(b.x) > Math.abs(a.x) ? b : a));
    const side = 32;
    const nodes = cells.flatMap(({ x, i, j }) => {
      const strength = Math.min(1, Math.abs(x));
      const where = { x: 20 + j * side, y: 20 + i * side, width: side - 2, height: side - 2 };
      const kind = x < 0 ? "play-negative" : "play-positive";
      const cell = svg("rect", { ...where, class: kind, "fill-opacity": strength });
      if (x > -0.05) return [cell];
      const mark = { x: 19 + (j + 0.5) * side, y: 24 + (i + 0.5) * side, class: "play-mark" };
      return [cell, svg("text", mark, "−")];
    });
    nodes.push(svg("text", { x: 20, y: 12 }, "value channels →"));
    const down = { x: -(20 + kdaPlay.K * side), y: 12, transform: "rotate(-90)" };
    nodes.push(svg("text", down, "← key channels"));
    $("state").replaceChildren(...nodes);

    const size = Math.sqrt(cells.reduce((sum, { x }) => sum + x * x, 0));
    const [now, first] = [kdaPlay.recallError(state, token - 1), kdaPlay.recallError(state, 0)];
    $("state-words").textContent =
      `After token ${token} of ${kdaPlay.T} the state has size ${number(size)}. Its largest cell ` +
      `is ${number(large.x)}, at key channel ${large.i}, value channel ${large.j}. The key just ` +
      `written reads its value with an error of ${percent(now)}, the key of token 1 with an ` +
      `error of ${percent(first)}.`;
  }

  function drawFactors({ g, C, format }) {
    const { plain, own, anchored } = kdaPlay.factors(g, C);
    const limit = Math.log2(kdaPlay.FORMATS[format].largest);
    const top = 1.4 * limit;
    const [left, right, up, floor] = [66, 470, 14, 204];
    const x = (row) => left + ((right - left) * row) / (C - 1);
    const y = (log) => floor - ((floor - up) * Math.min(log, top)) / top;
    const path = (logs) => logs.map((log, row) => `${row ? "L" : "M"}${x(row)} ${y(log)}`).join("");
    const line = (log, name, kind) => [
      svg("line", { x1: left, x2: right, y1: y(log), y2: y(log), class: kind }),
      svg("text", { x: left - 6, y: y(log) + 4, "text-anchor": "end" }, name),
    ];
    const over = kdaPlay.firstOverflow(plain, format);
    const nodes = [
      ...line(0, "1", "play-axis"),
      ...line(limit, `2^${Math.round(limit)}`, "play-limit"),
      svg("text", { x: left, y: y(limit) - 6 }, `largest ${format}`),
      svg("path", { d: path(plain), class: "play-plain" }),
      svg("path", { d: path(anchored), class: "play-anchored" }),
      svg("text", { x: left, y: floor + 18 }, "row 0"),
      svg("text", { x: right, y: floor + 18, "text-anchor": "end" }, `row ${C - 1}`),
    ];
    if (over >= 0) {
      const at = { cx: x(over), cy: y(plain[over]), r: 5, class: "play-over" };
      nodes.push(svg("circle", at));
    }
    $("factors").replaceChildren(...nodes);

    const verdict = (logs) => {
      const row = kdaPlay.firstOverflow(logs, format);
      const high = `reaches 2^${Math.round(Math.max(...logs))}`;
      return row < 0 ? `${high} and fits` : `${high}: infinity from row ${row} on`;
    };
    const gone = kdaPlay.firstVanishing(own, format);
    $("factors-words").textContent =
      `Chunk of ${C}, ${format}. Without a reference row the key's factor e^(−G) ` +
      `${verdict(plain)}` +
      (gone < 0 ? ". " : `, while its partner e^G falls below the normal numbers at row ${gone}. `) +
      `With the first row of each 16 as reference it ${verdict(anchored)}.`;
  }

  function drawTraffic({ D, C }) {
    const bytes = kdaPlay.traffic(D, C);
    const widest = Math.log10(bytes.loop);
    for (const name of ["loop", "chunks", "recurrent", "least"]) {
      const row = $(`bytes-${name}`);
      row.querySelector(".play-number").textContent = Math.round(bytes[name]).toLocaleString("en");
      row.querySelector(".play-times").textContent = `${number(bytes[name] / bytes.least, 1)} ×`;
      const bar = row.querySelector(".play-bar");
      bar.style.width = `${(100 * Math.log10(bytes[name])) / widest}%`;
    }
    $("bytes-words").textContent =
      `With K = V = ${D} and chunks of ${C}, the six kernels move ${Math.round(bytes.chunks)} ` +
      `bytes per token and head, ${number(bytes.chunks / bytes.least, 1)} times the ` +
      `${bytes.least} that every way must move. A loop that keeps the state in memory moves ` +
      `${Math.round(bytes.loop / bytes.least)} times as many.`;
  }

  function draw() {
    const now = chosen();
    say("gate", `${number(now.g)}: decay ${number(Math.exp(now.g), 3)}`);
    say("beta", number(now.beta));
    say("token", `${now.token} of ${kdaPlay.T}`);
    say("chunk", `${now.C} tokens`);
    drawState(now);
    drawFactors(now);
    drawTraffic(now);
  }

  function start() {
    if (!$("controls")) return;
    $("controls").hidden = false;
    $("controls").addEventListener("input", draw);
    draw();
  }

  if (typeof document !== "undefined") {
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
    else start();
  }
})();
