// The charts of a report: the main metric over time, with what happened, and each metric. The data is in the page.
"use strict";

(() => {
  const { Chart, element } = ckptChart;
  const SHOWN = 12;
  const place = document.getElementById("charts");
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { by: "step", log: false, smooth: 0, range: null };
  if (!data.metrics.length && !(data.wall_s > 0)) return;

  // The evaluations' losses are on the scale of a loss, and on no other.
  const main = data.metrics.find((name) => !name.includes("/")) || data.metrics[0];
  const alike = data.metrics.filter((name) => name !== main && name.includes("/") && main.includes("loss") && name.includes("loss"));
  const lines = [main, ...alike].filter((name) => name !== undefined);
  const course = new Chart(place);
  let seen = null;

  function showCourse() {
    course.show({
      title: main === undefined ? "Where the time went" : `${main} over time`, by: "time", log: state.log, smooth: state.smooth,
      range: seen, marks: data.marks, strip: data.strip, commits: data.commits, wall_s: data.wall_s,
      runs: lines.map((name, n) => ({ label: name, n, line: data.lines[name].line, left: data.lines[name].left, marks: data.marks })),
      onzoom: (low, high) => {
        seen = low === null ? null : [low, high];
        showCourse();
      },
    });
  }

  const small = element("div", { class: "small" });
  const charts = new Map();
  let every = false;

  function show() {
    const wanted = every ? data.metrics : data.metrics.slice(0, SHOWN);
    for (const name of wanted) if (!charts.has(name)) charts.set(name, new Chart(small));
    for (const [name, chart] of charts) {
      chart.root.hidden = !wanted.includes(name);
      if (!wanted.includes(name)) continue;
      const { line, left } = data.lines[name];
      chart.show({
        title: name, by: state.by, log: state.log, smooth: state.smooth, range: state.range, marks: data.marks,
        runs: [{ label: data.label, n: 0, line, left, marks: data.marks }],
        onzoom: (low, high) => set({ range: low === null ? null : [low, high] }),
      });
    }
  }

  function set(changes) {
    Object.assign(state, changes);
    whole.disabled = state.range === null;
    show();
    if ("log" in changes || "smooth" in changes) showCourse();
  }

  const whole = element("button", { type: "button", text: "Whole range", disabled: true, onclick: () => set({ range: null }) });
  const by = element("select", { onchange: (event) => set({ by: event.target.value, range: null }) },
    element("option", { value: "step", text: "step" }), element("option", { value: "time", text: "time since the start" }));
  const log = element("input", { type: "checkbox", onchange: (event) => set({ log: event.target.checked }) });
  const smooth = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: (event) => set({ smooth: Number(event.target.value) }) });
  const more = element("button", { type: "button", text: `Show all ${data.metrics.length} metrics`, onclick: () => {
    every = !every;
    more.textContent = every ? `Show ${SHOWN} metrics` : `Show all ${data.metrics.length} metrics`;
    show();
  } });
  place.append(element("div", { class: "tools" }, element("label", {}, "By ", by), element("label", {}, log, " log scale"),
    element("label", {}, "Smoothing ", smooth), whole, data.metrics.length > SHOWN ? more : null), small);
  showCourse();
  show();
})();
