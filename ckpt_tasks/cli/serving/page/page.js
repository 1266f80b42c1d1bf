// The page of `ckpt serve`: a live table of runs, curves of the chosen ones, and what is known of each.
// What the user has chosen is in the address after #, so that it can be sent and comes back after a reload.
"use strict";

(() => {
  const { Chart, SHARES, element, number, span, colour, dash } = ckptChart;
  const EVERY_MS = 1000;
  const SLOWEST_MS = 15000;
  const CHARTS = 6;
  const NEWEST = 5; // So many runs are drawn until the user chooses some.
  const METRIC_COLUMNS = 2;
  const POINTS = 800;
  const ALL_POINTS = 1e6;
  const MOST_CHOSEN = 24;
  const ABOUTS = 8;
  const $ = (id) => document.getElementById(id);

  const runs = new Map(); // The rows of the table, by name.
  const lines = new Map(); // The elements of the table's rows, by name.
  const curves = new Map(); // Answers of /api/curves by name: { key, answer }.
  const abouts = new Map(); // Answers of /api/run by name: { key, answer }.
  const charts = new Map(); // By metric.
  let revision = -1;
  let missing = false; // The directory of the runs does not exist.
  let server = null;
  let wait = EVERY_MS;
  let timer = 0;
  let every = false; // Show the charts of all metrics.
  let differences = false;
  let picked = []; // The chosen runs, or the newest ones.
  // `runs` and `columns` are null until the user chooses some.
  const state = { q: "", sort: "name", group: "", columns: null, by: "step", metric: "", log: false, smooth: 0, runs: null, range: null };

  // ── the address ──

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    state.q = given.get("q") || "";
    state.sort = given.get("sort") || "name";
    state.group = given.get("group") || "";
    state.columns = given.has("column") ? given.getAll("column").filter(Boolean) : null;
    state.metric = given.get("metric") || "";
    state.by = given.get("by") === "time" ? "time" : "step";
    state.log = given.get("log") === "1";
    state.smooth = Math.min(0.99, Math.max(0, Number(given.get("smooth")) || 0));
    state.runs = given.has("run") ? given.getAll("run").filter(Boolean).slice(0, MOST_CHOSEN) : null;
    const range = (given.get("range") || "").split("~").map(Number);
    state.range = range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
  }

  function writeAddress() {
    const given = new URLSearchParams();
    if (state.q) given.set("q", state.q);
    if (state.sort !== "name") given.set("sort", state.sort);
    if (state.group) given.set("group", state.group);
    if (state.by !== "step") given.set("by", state.by);
    if (state.metric) given.set("metric", state.metric);
    if (state.log) given.set("log", "1");
    if (state.smooth) given.set("smooth", state.smooth);
    if (state.range) given.set("range", state.range.join("~"));
    // An empty one says that the user has chosen none.
    for (const [key, chosen] of [["column", state.columns], ["run", state.runs]]) {
      for (const one of chosen?.length === 0 ? [""] : chosen || []) given.append(key, one);
    }
    history.replaceState(null, "", `#${given}`);
  }

  // ── what the server says ──

  // An object with no members but the server's: a metric may be called "constructor".
  function bare(_, value) {
    return value && typeof value === "object" && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value;
  }

  async function ask(path, parameters = {}) {
    const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`);
    if (answer.status === 401 || answer.status === 421) throw new Error(await answer.text());
    const body = JSON.parse(await answer.text(), bare);
    if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
    return body;
  }

  async function poll() {
    clearTimeout(timer);
    if (document.hidden) return; // Seen again, it asks at once.
    try {
      const answer = await ask("api/runs", { since: revision });
      if (server !== null && answer.server !== server) { // It was started again: its revisions are others.
        revision = -1;
        server = answer.server;
        runs.clear();
        wait = 0;
      } else {
        server = answer.server;
        wait = answer.complete ? EVERY_MS : 200;
        take(answer);
      }
    } catch (error) {
      wait = Math.min(SLOWEST_MS, Math.max(EVERY_MS, wait * 1.5));
      status(error instanceof TypeError ? "The server does not answer. Trying again…" : error.message, true);
    }
    timer = setTimeout(poll, wait);
  }

  function status(text, bad = false) {
    $("status").textContent = text;
    $("status").className = bad ? "bad" : "";
  }

  function take(answer) {
    for (const name of answer.gone) {
      runs.delete(name);
      lines.get(name)?.remove();
      lines.delete(name);
    }
    for (const row of answer.rows) {
      row.words = words(row);
      runs.set(row.name, row);
    }
    const new_ = answer.rows.length || answer.gone.length || revision === -1 || missing !== answer.missing;
    missing = answer.missing;
    revision = answer.revision;
    const before = picked.join("\n");
    const running = [...runs.values()].filter((run) => run.state === "running").length;
    const counts = `${runs.size} run${runs.size === 1 ? "" : "s"}, ${running} running`;
    status(answer.error || (answer.complete ? counts : `${counts}; reading the others…`), Boolean(answer.error));
    $("root").textContent = answer.root;
    document.title = `Runs in ${answer.root}`;
    if (new_) showTable();
    else showAges();
    if (!answer.complete) return;
    const changed = [...answer.rows.map((row) => row.name), ...answer.gone];
    if (!charts.size || picked.join("\n") !== before || changed.some((name) => picked.includes(name))) showChosen();
  }

  function words(run) {
    const parts = [run.name, run.run_key, run.state, run.host, run.program];
    for (const [name, value] of Object.entries(run.params)) parts.push(`${name}=${value}`);
    return parts.filter(Boolean).join("\n").toLowerCase();
  }

  // ── the table ──

  const ORDER = new Intl.Collator("en", { numeric: true });
  const heading = new Map(); // The headings of groups, by what they say.

  // The running runs, then those with the newest checkpoint.
  function newest() {
    const at = (run) => (run.state === "running" ? Number.MAX_VALUE : Date.parse(run.saved_at) || 0);
    return [...runs.values()].sort((a, b) => at(b) - at(a) || ORDER.compare(a.name, b.name)).slice(0, NEWEST).map((run) => run.name);
  }

  const COLUMNS = [
    { key: "name", title: "run" },
    { key: "state", title: "state" },
    { key: "step", title: "step (saved)", numbers: true, value: (run) => run.live_step ?? run.step, words: stepWords },
    { key: "saved_at", title: "saved", extra: true, words: (run) => age(run.saved_at) },
    { key: "checkpoints", title: "live", numbers: true, rare: true, words: (run) => (run.checkpoints === null ? "…" : run.checkpoints) },
    { key: "size_bytes", title: "size", numbers: true, rare: true, words: (run) => (run.size_bytes === null ? "…" : size(run.size_bytes)) },
  ];

  // A loss first, then what most runs have. `lists`: the names of each run's metrics.
  function metricNames(lists) {
    const runsWith = new Map();
    for (const names of lists) for (const name of names) runsWith.set(name, (runsWith.get(name) || 0) + 1);
    const rank = (name) => [!name.includes("loss"), name.includes("/"), !name.includes("entropy")].map(Number).join("");
    return [...runsWith.keys()].sort((a, b) => {
      const [x, y] = [rank(a), rank(b)];
      return x[0] - y[0] || runsWith.get(b) - runsWith.get(a) || x - y || ORDER.compare(a, b);
    });
  }

  const parameters = () => [...new Set([...runs.values()].flatMap((run) => Object.keys(run.params)))].sort(ORDER.compare);

  function everyColumn() {
    const names = metricNames([...runs.values()].map((run) => Object.keys({ ...run.live, ...run.metrics })));
    const metrics = names.map((name, n) => ({
      key: `metric ${name}`, title: name, numbers: true, extra: n > 0, usual: n < METRIC_COLUMNS,
      value: (run) => run.live[name] ?? run.metrics[name], words: (run) => number(run.live[name] ?? run.metrics[name]),
    }));
    const params = parameters().map((name) => {
      const numbers = [...runs.values()].every((run) => ["number", "undefined"].includes(typeof run.params[name]));
      const words = (run) => (run.params[name] === undefined ? undefined : String(run.params[name]));
      return { key: `param ${name}`, title: name, numbers, usual: false, value: numbers ? (run) => run.params[name] : words, words };
    });
    return [...COLUMNS.slice(0, 4), ...metrics, ...COLUMNS.slice(4), ...params];
  }

  function columns(all = everyColumn()) {
    if (!state.columns) return all.filter((column) => column.usual !== false);
    const chosen = state.columns.map((key) => all.find((column) => column.key === key && key !== "name"));
    return [COLUMNS[0], ...chosen.filter(Boolean).map((column) => ({ ...column, extra: false, rare: false }))];
  }

  // The name is always the first column. The button moves a column one place to the left.
  function showMenu() {
    if (!$("columns").open) return;
    const all = everyColumn();
    const shown = columns(all).slice(1);
    const keys = shown.map((column) => column.key);
    const rest = all.slice(1).filter((column) => !keys.includes(column.key));
    const focus = document.activeElement?.dataset?.column;
    const set = (to) => {
      state.columns = to;
      writeAddress();
      showTable();
    };
    const items = [...shown, ...rest].map((column) => {
      const at = keys.indexOf(column.key);
      const toggled = at < 0 ? [...keys, column.key] : keys.filter((key) => key !== column.key);
      const box = element("input", { type: "checkbox", checked: at >= 0, "data-column": column.key, onchange: () => set(toggled) });
      const before = at > 0 ? [...keys.slice(0, at - 1), column.key, keys[at - 1], ...keys.slice(at + 1)] : null;
      const move = before && element("button", { type: "button", text: "↑", title: "further to the left", "aria-label": `${column.title} further to the left`, "data-column": `move ${column.key}`, onclick: () => set(before) });
      return element("li", {}, element("label", {}, box, column.title + (column.key.startsWith("param ") ? " (parameter)" : "")), move);
    });
    const usual = element("button", { type: "button", text: "The usual columns", disabled: state.columns === null, onclick: () => set(null) });
    $("column-list").replaceChildren(element("li", {}, usual), ...items);
    if (focus) $("column-list").querySelector(`[data-column="${CSS.escape(focus)}"]`)?.focus();
  }

  function stepWords(run) {
    const committed = run.step === null ? "" : run.step.toLocaleString("en");
    if (run.step === null && run.live_step === null) return "no checkpoint";
    if (run.live_step === null) return committed;
    return `${run.live_step.toLocaleString("en")} (${committed || "none"})`;
  }

  const valueOf = (column, run) => (column.value ? column.value(run) : run[column.key]);

  function shown() {
    const wanted = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...runs.values()].filter((run) => wanted.every((word) => run.words.includes(word)));
    const falling = state.sort.startsWith("-");
    const key = state.sort.replace(/^-/, "");
    const column = everyColumn().find((one) => one.key === key) || COLUMNS[0];
    const value = (run) => valueOf(column, run);
    const lacks = (one) => one === null || one === undefined || typeof one !== (column.numbers ? "number" : "string");
    return found.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (lacks(x) || lacks(y)) return lacks(x) - lacks(y) || ORDER.compare(a.name, b.name);
      const by = column.numbers ? x - y : ORDER.compare(x, y);
      return (falling ? -by : by) || ORDER.compare(a.name, b.name);
    });
  }

  // Titles and runs by the value of the parameter; a group keeps the order of its runs.
  function groupsOf(rows) {
    const groups = new Map();
    for (const run of rows) {
      const value = run.params[state.group];
      groups.set(value, [...(groups.get(value) || []), run]);
    }
    const lacks = (value) => value === undefined;
    const rising = ([a], [b]) => lacks(a) - lacks(b) || (typeof a === "number" && typeof b === "number" ? a - b : ORDER.compare(a, b));
    return [...groups].sort(rising).map(([value, members]) => [lacks(value) ? `no ${state.group}` : `${state.group} = ${value}`, members]);
  }

  function grouped(rows, heads) {
    if (!state.group) return rows.map((run) => rowOf(run, heads));
    return groupsOf(rows).flatMap(([title, members]) => {
      const text = `${title} (${members.length})`;
      const key = JSON.stringify([text, heads.length, members.map((run) => run.name)]);
      if (!heading.has(key)) {
        const button = element("button", { type: "button", text, title: "choose these runs", onclick: () => choose(members.map((run) => run.name)) });
        heading.set(key, element("tr", { class: "group" }, element("th", { colspan: heads.length + 1, scope: "rowgroup" }, button)));
      }
      return [heading.get(key), ...members.map((run) => rowOf(run, heads))];
    });
  }

  function showGroups() {
    const names = parameters().filter((name) => name === state.group || new Set([...runs.values()].map((run) => run.params[name])).size > 1);
    const has = [...$("group").options].map((option) => option.value).slice(1);
    if (has.join("\n") !== names.join("\n")) {
      $("group").replaceChildren($("group").options[0], ...names.map((name) => element("option", { value: name, text: name })));
    }
    $("group").value = state.group;
    $("group").parentElement.hidden = names.length === 0;
  }

  function showTable() {
    picked = state.runs || newest();
    showGroups();
    showMenu();
    const heads = columns();
    const head = element("tr", {}, element("th", { class: "pick" }, element("span", { class: "only-read", text: "chosen" })));
    for (const column of heads) {
      const sorted = state.sort.replace(/^-/, "") === column.key;
      const falling = state.sort.startsWith("-");
      const mark = sorted ? (falling ? " ↓" : " ↑") : "";
      const button = element("button", { type: "button", text: column.title + mark, "data-sort": column.key, onclick: () => sortBy(column, sorted, falling) });
      head.append(element("th", { class: look(column), "aria-sort": sorted ? (falling ? "descending" : "ascending") : null }, button));
    }
    const focus = document.activeElement?.dataset?.sort;
    $("table").tHead.replaceChildren(head);
    if (focus) $("table").tHead.querySelector(`[data-sort="${CSS.escape(focus)}"]`)?.focus();
    const rows = shown();
    const body = $("table").tBodies[0];
    const made = grouped(rows, heads);
    const same = made.length === body.children.length && made.every((one, n) => one === body.children[n]);
    if (!same) { // Moving an element takes the focus from it.
      const active = document.activeElement;
      body.replaceChildren(...made);
      if (active && active !== document.activeElement && body.contains(active)) active.focus();
    }
    const here = $("root").textContent;
    const none = missing ? `There is no directory ${here} yet.` : `There is no run in ${here} yet.`;
    $("empty").textContent = runs.size ? "No run matches the search." : `${none} The page shows a run as soon as it is there.`;
    $("empty").hidden = rows.length > 0 || revision < 0;
    $("table-scroll").hidden = rows.length === 0;
    $("clear").disabled = picked.length === 0;
    $("clear").textContent = picked.length ? `Choose none of ${picked.length}` : "Choose none";
  }

  const look = (column) => [column.numbers ? "n" : "", column.extra ? "extra" : "", column.rare ? "extra2" : ""].join(" ").trim() || null;

  function sortBy(column, sorted, falling) {
    state.sort = sorted ? (falling ? column.key : `-${column.key}`) : column.numbers && !column.value ? `-${column.key}` : column.key;
    writeAddress();
    showTable();
  }

  function rowOf(run, heads) {
    const chosen = picked.includes(run.name);
    const key = JSON.stringify([chosen, heads.map((column) => column.key), run]);
    let line = lines.get(run.name);
    if (line && line.key === key) return line;
    const cells = heads.map((column) => {
      if (column.key === "name") {
        return element("td", { class: "name" }, element("button", { type: "button", text: run.name, title: `${run.name}\n${run.url}`, onclick: () => choose([run.name]) }));
      }
      if (column.key === "state") {
        const why = run.why && run.state !== "ended" ? element("span", { class: "why", text: run.why, title: run.why }) : null;
        return element("td", { class: run.state }, run.state, why);
      }
      const text = column.words ? column.words(run) : run[column.key];
      return element("td", { class: look(column), text, "data-saved": column.key === "saved_at" ? run.saved_at : null });
    });
    const box = element("input", { type: "checkbox", checked: chosen, "aria-label": `choose ${run.name}`, onchange: () => toggle(run.name) });
    const focused = line && line.contains(document.activeElement) ? document.activeElement.type : null;
    const row = line || element("tr");
    row.className = chosen ? "chosen" : "";
    row.replaceChildren(element("td", { class: "pick" }, box), ...cells);
    row.key = key;
    if (focused) row.querySelector(`[type="${focused}"]`)?.focus();
    lines.set(run.name, row);
    return row;
  }

  function showAges() {
    for (const cell of document.querySelectorAll("[data-saved]")) cell.textContent = age(cell.dataset.saved);
  }

  function age(saved) {
    const at = Date.parse(saved);
    if (!saved || Number.isNaN(at)) return "";
    const seconds = (Date.now() - at) / 1000;
    return seconds < 1 ? "now" : `${span(Math.round(seconds))} ago`;
  }

  function size(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let n = 0;
    for (; bytes >= 1023.95 && n < units.length - 1; n += 1) bytes /= 1024;
    return `${n ? bytes.toFixed(1) : bytes} ${units[n]}`;
  }

  // ── the chosen runs ──

  function choose(names) {
    state.runs = names.slice(0, MOST_CHOSEN);
    state.range = null;
    every = false;
    writeAddress();
    showTable();
    showChosen();
  }

  function toggle(name) {
    const others = picked.filter((one) => one !== name);
    state.runs = others.length < picked.length ? others : [...others, name].slice(-MOST_CHOSEN);
    writeAddress();
    showTable();
    showChosen();
  }

  // The newest checkpoint may lack metrics that earlier steps have.
  const metricsOf = (name) => new Set([...Object.keys(runs.get(name).metrics), ...(curves.get(name)?.answer?.metrics || [])]);

  const chosen = () => picked.filter((name) => runs.has(name));

  function showChosen() {
    const names = chosen();
    $("chart-tools").hidden = names.length === 0;
    $("by").value = state.by;
    $("log").checked = state.log;
    $("smooth").value = state.smooth;
    $("smooth-value").textContent = state.smooth.toFixed(2);
    $("whole").disabled = state.range === null;
    const words = state.metric.toLowerCase().split(/\s+/).filter(Boolean);
    const known = metricNames(names.map(metricsOf));
    const metrics = known.filter((metric) => words.every((word) => metric.toLowerCase().includes(word)));
    showNotes(names, known.length > 0 && metrics.length === 0);
    const wanted = every ? metrics : metrics.slice(0, CHARTS);
    $("more").hidden = metrics.length <= CHARTS;
    $("more").textContent = every ? `Show ${CHARTS} metrics` : `Show all ${metrics.length} metrics`;
    for (const [metric, chart] of charts) {
      if (!wanted.includes(metric)) {
        chart.remove();
        charts.delete(metric);
      }
    }
    for (const metric of wanted) if (!charts.has(metric)) charts.set(metric, new Chart($("charts")));
    draw(wanted, names);
    for (const name of names) fetchCurves(name, wanted);
    for (const name of names.slice(0, ABOUTS)) fetchAbout(name);
    showAbouts();
  }

  // Why there is no curve.
  function showNotes(names, isFiltered) {
    const gone = revision < 0 ? [] : picked.filter((name) => !runs.has(name));
    const notes = gone.length ? [`Not here, or not here any more: ${gone.join(", ")}.`] : [];
    if (!names.length && !gone.length && runs.size) notes.push("Choose runs in the table: their curves are drawn over each other here.");
    for (const name of names) {
      const run = runs.get(name);
      if (run.step === null && run.live_step === null) notes.push(`${name} has no checkpoint yet.`);
      else if (curves.get(name)?.answer && !metricsOf(name).size) notes.push(`${name} has no metrics.`);
    }
    if (isFiltered) notes.push("No metric matches the filter.");
    $("none").replaceChildren(...notes.map((text) => element("li", { text })));
    $("none").hidden = notes.length === 0;
  }

  function swatch(n) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("viewBox", "0 0 26 10");
    line.setAttribute("d", "M0 5h26");
    line.setAttribute("stroke-width", "3");
    line.setAttribute("stroke", colour(n));
    line.setAttribute("stroke-dasharray", dash(n).join(" "));
    svg.append(line);
    return svg;
  }

  function draw(wanted = [...charts.keys()], names = chosen()) {
    const reading = (name) => (curves.get(name)?.answer ? "" : " (reading…)");
    const ranks = (name) => (abouts.get(name)?.answer?.ranks > 1 ? ` (${abouts.get(name).answer.ranks} ranks)` : "");
    const words = (name) => name + ranks(name) + reading(name);
    const groups = state.group ? groupsOf(names.map((name) => runs.get(name))).map(([title, members]) => [title, members.map((run) => run.name)]) : [];
    const look = new Map(groups.length ? groups.flatMap(([, members], n) => members.map((name) => [name, n])) : names.map((name, n) => [name, n]));
    const keys = groups.length ? groups.map(([title, members]) => `${title}: ${members.map(words).join(", ")}`) : names.map(words);
    $("legend").replaceChildren(...keys.map((text, n) => element("li", {}, swatch(n), text)));
    for (const metric of wanted) {
      const drawn = [];
      let course = {};
      const marks = [];
      let busy = false;
      names.forEach((name) => {
        const n = look.get(name);
        const answer = curves.get(name)?.answer;
        busy = busy || !answer;
        const found = answer?.lines[metric];
        if (found) drawn.push({ label: name, n, line: found.line, left: found.left, marks: answer.marks });
        if (found && names.length > 1) marks.push(...answer.marks.map((mark) => ({ ...mark, n, label: name })));
        if (answer && names.length === 1) course = answer;
      });
      charts.get(metric).show({
        title: metric, by: state.by, log: state.log, smooth: state.smooth, busy,
        marks: course.marks || marks, strip: course.strip, commits: course.commits, wall_s: course.wall_s, range: state.range, runs: drawn, onzoom: zoom, whole: () => whole(metric, drawn),
      });
    }
  }

  async function whole(metric, drawn) {
    const asked = { metrics: JSON.stringify([metric]), by: state.by, most: ALL_POINTS };
    try {
      return await Promise.all(drawn.map(async (one) => ({ ...one, ...(await ask("api/curves", { run: one.label, ...asked })).lines[metric] })));
    } catch (error) {
      status(`${metric}: ${error.message}`, true);
      return drawn;
    }
  }

  function zoom(low, high) {
    state.range = low === null ? null : [low, high];
    writeAddress();
    showChosen();
  }

  async function fetchCurves(name, metrics) {
    const [low, high] = state.range || [-Infinity, Infinity];
    const margin = Number.isFinite(high - low) ? (high - low) / 20 : 0;
    const ends = { low: low - margin, high: high + margin };
    const key = JSON.stringify([metrics, state.by, ends.low, ends.high, runs.get(name)]);
    if (curves.get(name)?.key === key) return;
    const before = curves.get(name)?.answer;
    curves.set(name, { key, answer: before });
    const asked = {
      run: name, metrics: JSON.stringify(metrics), by: state.by, most: POINTS,
      low: String(ends.low).replace("Infinity", "inf"), high: String(ends.high).replace("Infinity", "inf"),
    };
    try {
      const answer = await ask("api/curves", asked);
      if (curves.get(name)?.key !== key || !runs.has(name)) return; // Another question was asked meanwhile.
      const known = before ? metricsOf(name).size : -1;
      curves.set(name, { key, answer });
      if (metricsOf(name).size > known) showChosen();
    } catch (error) {
      if (curves.get(name)?.key === key) curves.delete(name);
      status(`${name}: ${error.message}`, true);
    }
    if (picked.includes(name)) draw();
  }

  async function fetchAbout(name) {
    const key = JSON.stringify(runs.get(name));
    if (abouts.get(name)?.key === key) return;
    abouts.set(name, { key, answer: abouts.get(name)?.answer });
    try {
      const answer = await ask("api/run", { run: name });
      if (abouts.get(name)?.key === key) abouts.set(name, { key, answer });
    } catch (error) {
      abouts.set(name, { key: null, answer: { error: error.message } });
    }
    if (picked.includes(name)) {
      showAbouts();
      draw();
    }
  }

  function showAbouts() {
    const names = chosen().slice(0, ABOUTS);
    const open = new Set([...document.querySelectorAll("#abouts details[open]")].map((one) => one.dataset.run));
    const blocks = names.filter((name) => abouts.get(name)?.answer).map((name) => {
      const is = open.has(name) || names.length === 1;
      return element("details", { "data-run": name, open: is }, element("summary", {}, element("h2", { text: name })), ...about(abouts.get(name).answer));
    });
    $("abouts").replaceChildren(...blocks);
    showCompare(names);
  }

  function about(run) {
    if (run.error) return [element("p", { class: "bad", text: run.error })];
    const bar = element("div", { class: "shares", role: "img", "aria-label": run.shares.map((one) => `${one.name} ${percent(one.part)}`).join(", ") });
    for (const one of run.shares) {
      const piece = element("i", { title: `${one.name} ${percent(one.part)}` });
      piece.style.flex = String(one.part);
      piece.style.background = SHARES[one.name];
      bar.append(piece);
    }
    const shares = run.shares.map((one) => [key(one.name), one.name, span(one.seconds), percent(one.part), one.means]);
    const heads = run.checkpoints.length ? Object.keys(run.checkpoints[0]) : [];
    const rows = run.checkpoints.map((one) => heads.map((head) => one[head]));
    const more = run.live > rows.length ? [element("p", { text: `The newest ${rows.length} of ${run.live}; ckpt ls has all.` })] : [];
    return [
      element("p", { text: run.summary }),
      ...run.caveats.map((text) => element("p", { class: "caveat", text })),
      ...(run.shares.length ? [element("h4", { text: "Where the time went" }), bar, table([], shares, [2, 3], [4])] : []),
      ...(run.returns.rows.length ? [element("h4", { text: "From a death to the first step" }), table(run.returns.head, run.returns.rows, run.returns.head.map((_, n) => n))] : []),
      ...(run.happenings.length ? [element("h4", { text: "What happened" }), table(["when (UTC)", "", "why"], run.happenings, [], [2])] : []),
      element("h4", { text: "In numbers" }), table([], [...(run.ranks ? [["ranks", run.ranks]] : []), ...run.facts], [], [1]),
      ...(rows.length ? [element("h4", { text: "Checkpoints" }), table(heads, rows, [0]), ...more] : []),
    ];
  }

  function key(name) {
    const piece = element("i", { class: "swatch" });
    piece.style.background = SHARES[name];
    return piece;
  }

  const percent = (part) => `${Number((100 * part).toPrecision(part < 0.0995 ? 2 : 3))} %`;

  function table(heads, rows, numbers = [], texts = []) {
    const css = (n) => (numbers.includes(n) ? "n" : texts.includes(n) ? "w" : null);
    const cell = (tag, content, n) => element(tag, { class: css(n) }, content);
    const head = heads.length ? [element("tr", {}, ...heads.map((text, n) => cell("th", text, n)))] : [];
    const lines = rows.map((row) => element("tr", {}, ...row.map((content, n) => cell("td", content, n))));
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": heads.join(", ") || "table" }, element("table", {}, ...head, ...lines));
  }

  // ── what differs ──

  function showCompare(names) {
    if (!names.length) {
      $("compare").replaceChildren();
      return;
    }
    const parts = [
      ["Parameters", (name) => runs.get(name).params],
      ["Code, packages and machine", (name) => abouts.get(name)?.answer?.environment || {}],
    ];
    const made = [];
    for (const [title, of] of parts) {
      const sides = names.map(of);
      const keys = [...new Set(sides.flatMap(Object.keys))];
      const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
      const rows = keys.map((one) => ({ one, cells: sides.map((side) => text(side[one])) }));
      for (const row of rows) row.differs = new Set(row.cells).size > 1;
      const first = rows.filter((row) => row.differs);
      const rest = differences ? [] : rows.filter((row) => !row.differs);
      if (!rows.length) continue;
      const body = [...first, ...rest].map((row) => element("tr", { class: row.differs ? "differs" : null }, element("th", { scope: "row", text: row.one }), ...row.cells.map((cell) => element("td", { class: "w", text: cell }))));
      const head = names.length > 1 ? element("tr", {}, element("th"), ...names.map((name) => element("th", { scope: "col", text: name }))) : null;
      made.push(element("h4", { text: title }), body.length ? element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title }, element("table", {}, head, ...body)) : element("p", { text: "No difference." }));
    }
    const box = element("input", { type: "checkbox", checked: differences, id: "differences", onchange: (event) => {
      differences = event.target.checked;
      showCompare(names);
      $("differences").focus();
    } });
    const only = names.length > 1 && made.length ? element("label", {}, box, " only what differs") : null;
    $("compare").replaceChildren(...(only ? [only] : []), ...made);
  }

  // ── the beginning ──

  $("search").addEventListener("input", (event) => {
    state.q = event.target.value;
    writeAddress();
    showTable();
  });
  $("clear").addEventListener("click", () => choose([]));
  $("columns").addEventListener("toggle", showMenu);
  $("group").addEventListener("change", (event) => {
    state.group = event.target.value;
    writeAddress();
    showTable();
    draw();
  });
  $("metric").addEventListener("input", (event) => {
    state.metric = event.target.value;
    writeAddress();
    showChosen();
  });
  $("by").addEventListener("change", (event) => {
    state.by = event.target.value;
    state.range = null;
    writeAddress();
    showChosen();
  });
  $("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    writeAddress();
    draw();
  });
  $("smooth").addEventListener("input", (event) => {
    state.smooth = Number(event.target.value);
    $("smooth-value").textContent = state.smooth.toFixed(2);
    writeAddress();
    draw();
  });
  $("whole").addEventListener("click", () => zoom(null, null));
  $("more").addEventListener("click", () => {
    every = !every;
    showChosen();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showChosen);
  function begin() {
    readAddress();
    $("search").value = state.q;
    $("metric").value = state.metric;
  }

  addEventListener("hashchange", () => {
    begin();
    showTable();
    showChosen();
  });
  begin();
  poll();
})();
