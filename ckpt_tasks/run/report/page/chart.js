// Charts of curves over each other, by uPlot: hover, zoom by dragging, log scale and smoothing. Used by `ckpt serve`
// and by the one file of `ckpt report`. Texts reach the page by textContent only.
"use strict";

const ckptChart = (() => {
  const COLOURS = 8;
  const DASHES = [[], [7, 4], [2, 3]];
  const HEIGHT = 240;
  // Round spans of time for the ticks of an axis, in seconds.
  const SPANS = [1e-3, 1e-2, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  for (let days = 2; days < 1e5; days *= days.toString()[0] === "2" ? 2.5 : 2) SPANS.push(days * 86400);
  const MOST_ROWS = 12;
  const FIRST = 8; // Runs that are equal in so many values are drawn in dashes through each other.
  const NEAR_PX = 8; // The tooltip leaves out a run whose nearest value is farther away.
  const OWNERS = ["taken", "lost"];
  // What the time went into, as in the table of a report.
  const SHARES = {
    useful: "#2e9e6b", lost: "#d1495b", saving: "#d9a100", starting: "#7d8ff0", down: "#8b8f98", idle: "#c9ccd3",
    data: "#8f6bb3", unattributed: "#5fb3c4",
  };
  const charts = new Set();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (n) => css(`--c${n % COLOURS}`);
  const dash = (n) => DASHES[Math.floor(n / COLOURS) % DASHES.length];

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") made.textContent = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  function number(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
    const text = value.toPrecision(4);
    return text.includes("e") ? text : String(Number(text));
  }

  function span(seconds) {
    const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const [length, unit] = units.find(([length]) => seconds >= 2 * length) || [1e-3, "ms"];
    const amount = seconds / length;
    return seconds === 0 ? "0" : `${amount < 9.95 ? Number(amount.toFixed(1)) : Math.round(amount)} ${unit}`;
  }

  // An exponential mean of the values so far, without the bias of its beginning. Of a thinned line it takes the mean of
  // each bucket, with the weight of all of its values.
  function smoothed(line, weight) {
    const base = line.mean || line;
    const keep = weight ** (line.mean ? line.mean.each : 1);
    let sum = 0;
    let share = 0;
    const value = base.value.map((one) => {
      if (one === null) return null;
      sum = keep * sum + (1 - keep) * one;
      share = keep * share + (1 - keep);
      return share > 0 ? sum / share : one;
    });
    return { ...base, value };
  }

  // By time, no line is drawn from one process to the next: a new owner is a gap.
  function columns(line, by, log, marks) {
    const along = by === "time" ? line.at_s : line.step;
    const begins = by === "time" ? marks.filter((mark) => OWNERS.includes(mark.kind)).map((mark) => mark.at_s) : [];
    const xs = [];
    const ys = [];
    let next = 0;
    for (let n = 0; n < along.length; n += 1) {
      const value = log && !(line.value[n] > 0) ? null : line.value[n];
      const first = next;
      while (next < begins.length && begins[next] <= along[n]) next += 1;
      if (xs.length && next > first && along[n] > xs[xs.length - 1]) {
        xs.push((xs[xs.length - 1] + along[n]) / 2);
        ys.push(null);
      }
      if (xs.length && along[n] <= xs[xs.length - 1]) {
        if (along[n] === xs[xs.length - 1] && value !== null) ys[ys.length - 1] = value; // Two values of one step.
        continue;
      }
      xs.push(along[n]);
      ys.push(value);
    }
    return [xs, ys];
  }

  // The nearest value of a run, or null if it has none near: the lines of several runs are thinned at different steps.
  function nearest(plot, series, at) {
    const values = plot.data[series];
    const xs = plot.data[0];
    const has = (n) => values[n] !== null && values[n] !== undefined;
    let [before, after] = [at, at];
    while (before >= 0 && !has(before)) before -= 1;
    while (after < values.length && !has(after)) after += 1;
    const found = before < 0 || (after < values.length && xs[after] - xs[at] < xs[at] - xs[before]) ? after : before;
    const away = (n) => Math.abs(plot.valToPos(xs[n], "x") - plot.valToPos(xs[at], "x"));
    return found < values.length && away(found) <= NEAR_PX ? found : null;
  }

  // The ends of an axis whose values are all the same.
  const around = (value, part) => [value - (Math.abs(value) * part || 1), value + (Math.abs(value) * part || 1)];

  function saveFile(name, blob) {
    const link = element("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  function again({ again }) {
    if (!again) return "";
    const [from, to] = again;
    return from === to ? `; step ${to} was trained again` : `; steps ${from} to ${to} were trained again`;
  }

  // Marks of what happened; by time also a tick for each commit, and a strip of what the time went into.
  function drawCourse(what) {
    return (plot) => {
      const { ctx, bbox } = plot;
      const { by } = what;
      const marks = what.marks || [];
      const high = 9 * devicePixelRatio;
      const bottom = bbox.top + bbox.height;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      const strip = by === "time" ? what.strip || [] : [];
      const ends = strip.map((_, n) => plot.valToPos((n * what.wall_s) / strip.length, "x", true));
      ends.push(plot.valToPos(what.wall_s || 0, "x", true));
      strip.forEach((share, n) => {
        ctx.fillStyle = SHARES[share];
        ctx.fillRect(ends[n], bottom - high, Math.max(1, ends[n + 1] - ends[n] + 0.5), high);
      });
      ctx.fillStyle = css("--good");
      for (const at_s of by === "time" ? what.commits || [] : []) {
        ctx.fillRect(plot.valToPos(at_s, "x", true), bottom - 1.7 * high, devicePixelRatio, 0.6 * high);
      }
      for (const mark of marks) {
        const x = Math.round(plot.valToPos(by === "time" ? mark.at_s : mark.step, "x", true));
        ctx.strokeStyle = mark.n === undefined ? css(mark.kind === "taken" ? "--again" : "--fail") : colour(mark.n);
        if (by === "step" && mark.again) {
          const [from, to] = mark.again.map((step) => plot.valToPos(step, "x", true));
          ctx.fillStyle = `${ctx.strokeStyle}2b`;
          ctx.fillRect(from, bbox.top, Math.max(2 * devicePixelRatio, to - from), bbox.height);
        }
        ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
        ctx.lineWidth = devicePixelRatio;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    };
  }

  // A chart of one metric in `place`. `what`: title, by ("step" or "time"), log, smooth (0 to 0.999), marks, range (low
  // and high, or null), onzoom(low, high), and runs: label, n (its colour), marks, line and left (as the server thins
  // them). `whole()`, if given, promises the runs with all values, for the file of a CSV.
  class Chart {
    constructor(place) {
      this.title = element("h3");
      this.note = element("p", { class: "chart-note", hidden: true });
      this.canvas = element("div", { class: "chart-canvas", tabindex: "0", role: "img" });
      this.tip = element("div", { class: "chart-tip", hidden: true });
      this.keys = element("ul", { class: "chart-keys" });
      this.files = element("span", { class: "chart-files" },
        element("button", { type: "button", text: "CSV", onclick: () => this.saveTable() }),
        element("button", { type: "button", text: "PNG", onclick: () => this.savePicture() }));
      this.root = element("figure", { class: "chart" }, element("div", { class: "chart-head" }, this.title, this.files), this.note, this.canvas, this.keys, this.tip);
      place.append(this.root);
      this.plot = null;
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("blur", () => { this.tip.hidden = true; });
      this.resized = new ResizeObserver(() => this.fit());
      this.resized.observe(this.canvas);
      charts.add(this);
    }

    remove() {
      charts.delete(this);
      this.resized.disconnect();
      if (this.plot) this.plot.destroy();
      this.root.remove();
    }

    fit() {
      const width = this.canvas.clientWidth;
      if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
    }

    show(what) {
      this.what = what;
      if (this.plot) this.plot.destroy();
      this.tip.hidden = true;
      const [tables, series, equal] = this.series(what);
      // 2: a gap of one run stays a gap between the values of others.
      const data = tables.length ? uPlot.join(tables, tables.map(() => [0, 2])) : [[]];
      const some = data.slice(1).some((values) => values.some((value) => value !== null && value !== undefined));
      this.title.textContent = what.title;
      const had = what.runs.some((run) => run.line.value.length);
      const empty = !had ? "No value yet." : what.log ? "No value above zero." : "No finite value: all are NaN or infinite.";
      const alone = some && what.runs.every((run) => run.line.value.length < 2 && !run.left.length);
      this.note.textContent = alone ? this.values(what) : some ? "" : what.busy ? "Reading…" : empty;
      this.note.hidden = some && !alone;
      this.canvas.hidden = this.files.hidden = !some || alone;
      this.plot = null;
      this.canvas.setAttribute("aria-label", this.words(what));
      const shares = Object.keys(SHARES).filter((share) => what.by === "time" && (what.strip || []).includes(share));
      this.keys.replaceChildren(...shares.map((share) => element("li", {}, this.swatch(SHARES[share]), share)));
      if (some && shares.length && (what.commits || []).length) this.keys.append(element("li", { text: "tick: a commit" }));
      if (some && (what.marks || []).length) this.keys.append(element("li", { text: "dashed: a failure, a resume or a rollback" }));
      if (some && what.by === "step" && (what.marks || []).some((mark) => mark.again)) this.keys.append(element("li", { text: "shaded: trained again" }));
      if (!alone) this.keys.append(...equal.map((labels) => element("li", { text: `equal, at least at first: ${labels.join(", ")}` })));
      if (some && !alone) this.plot = new uPlot(this.options(what, series, data[0]), data, this.canvas);
    }

    series(what) {
      const tables = [];
      const series = [{}];
      const drawn = new Map(); // The labels of the runs that begin with these values.
      const add = (line, look, marks) => {
        const [xs, ys] = columns(line, what.by, what.log, marks || []);
        if (!xs.length) return;
        tables.push([xs, ys]);
        if (look.run) {
          const values = JSON.stringify([xs.slice(0, FIRST), ys.slice(0, FIRST)]);
          const labels = drawn.get(values) || [];
          drawn.set(values, [...labels, look.run.label]);
          const turn = 24 / (labels.length + 1); // Dashes through which the lines below can be seen.
          if (labels.length) look = { ...look, dash: [turn, 24 - turn] };
        }
        series.push({ spanGaps: false, points: { show: xs.length < 60 && look.width > 1, size: 5 }, ...look });
      };
      for (const run of what.runs) {
        const stroke = colour(run.n);
        for (const left of run.left) add(left, { stroke: `${stroke}77`, width: 1, dash: [3, 3] }, run.marks);
        if (what.smooth > 0) {
          add(run.line, { stroke: `${stroke}55`, width: 1 }, run.marks);
          add(smoothed(run.line, what.smooth), { stroke, width: 2, dash: dash(run.n), run }, run.marks);
        } else {
          add(run.line, { stroke, width: 1.6, dash: dash(run.n), run }, run.marks);
        }
      }
      return [tables, series, [...drawn.values()].filter((labels) => labels.length > 1)];
    }

    options(what, series, xs) {
      const [ink, rule] = [css("--pale"), css("--rule")];
      const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
      const font = "12px system-ui, sans-serif";
      const words = what.by === "time" ? (value) => span(value) : (value) => number(value);
      const range = what.range || (xs.length === 1 ? around(xs[0], 0.05) : null);
      return {
        width: Math.max(200, this.canvas.clientWidth),
        height: HEIGHT,
        series,
        legend: { show: false },
        scales: {
          x: { time: false, range: (_, min, max) => range || [min, max] },
          // The strip of a course lies below the curve.
          y: what.by === "time" && what.strip && !what.log
            ? { range: (_, min, max) => { const room = max - min || Math.abs(max) / 10 || 1; return [min - 0.16 * room, max + 0.06 * room]; } }
            : what.log ? { distr: 3 } : { range: (_, min, max) => (min === max ? around(min, 0.1) : uPlot.rangeNum(min, max, 0.1, true)) },
        },
        axes: [
          { ...axis, font, space: 70, values: (_, ticks) => ticks.map(words), ...(what.by === "time" ? { incrs: SPANS } : {}) },
          { ...axis, font, size: (_, texts) => 18 + 7 * Math.max(4, ...(texts || []).map((text) => text.length)), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
        ],
        cursor: {
          drag: { x: true, y: false, setScale: false },
          dataIdx: (plot, at, hovered) => (at === 0 ? hovered : nearest(plot, at, hovered)),
          points: { size: 7 },
        },
        hooks: {
          drawClear: [drawCourse(what)],
          setCursor: [(plot) => this.hover(plot)],
          setSelect: [(plot) => this.zoom(plot)],
          ready: [(plot) => plot.over.addEventListener("dblclick", () => what.onzoom && what.onzoom(null, null))],
        },
      };
    }

    zoom(plot) {
      const { left, width } = plot.select;
      if (width < 4 || !this.what.onzoom) return;
      const [low, high] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      this.what.onzoom(low, high);
    }

    hover(plot) {
      const { left, top, idx } = plot.cursor;
      if (idx === null || idx === undefined || left < 0) {
        this.tip.hidden = true;
        return;
      }
      const { by, marks } = this.what;
      const x = plot.data[0][idx];
      const rows = [];
      plot.series.forEach((series, n) => {
        if (!series.run) return;
        const at = nearest(plot, n, idx);
        if (at === null) return;
        const far = plot.data[0][at] === x ? "" : ` at ${by === "time" ? span(plot.data[0][at]) : plot.data[0][at]}`;
        rows.push(element("li", {}, this.swatch(colour(series.run.n)), element("b", { text: number(plot.data[n][at]) }), ` ${series.run.label}${far}`));
      });
      const near = (marks || []).filter((mark) => {
        const at = plot.valToPos(by === "time" ? mark.at_s : mark.step, "x");
        return Math.abs(at - left) < 6;
      });
      for (const mark of near.slice(0, 3)) rows.push(element("li", { text: `${mark.label ? `${mark.label}, ` : ""}${OWNERS.includes(mark.kind) ? "resumed" : mark.kind}: ${mark.text}${again(mark)}` }));
      if (rows.length > MOST_ROWS) rows.splice(MOST_ROWS, rows.length, element("li", { text: `and ${rows.length - MOST_ROWS} more` }));
      const head = by === "time" ? `after ${span(x)}` : `step ${x}`;
      this.tip.replaceChildren(element("p", { text: head }), element("ul", {}, ...rows));
      this.tip.hidden = false;
      const space = this.root.clientWidth - this.tip.offsetWidth;
      const wanted = plot.over.offsetLeft + left + 14;
      const flipped = plot.over.offsetLeft + left - this.tip.offsetWidth - 14;
      this.tip.style.left = `${Math.max(0, wanted > space ? flipped : wanted)}px`;
      this.tip.style.top = `${this.canvas.offsetTop + Math.max(0, top - 20)}px`;
    }

    // A row for each value: kept, or discarded when training went back.
    async saveTable() {
      const { title, whole } = this.what;
      const runs = whole ? await whole() : this.what.runs;
      const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
      const rows = ["run,step,seconds,value,part"];
      const add = (label, line, part) => line.step.forEach((step, n) => rows.push(`${quoted(label)},${step},${line.at_s[n]},${line.value[n] ?? ""},${part}`));
      for (const run of runs) {
        add(run.label, run.line, "kept");
        for (const left of run.left) add(run.label, left, "discarded");
      }
      saveFile(`${title}.csv`, new Blob([`${rows.join("\n")}\n`], { type: "text/csv" }));
    }

    savePicture() {
      const drawn = this.plot.ctx.canvas;
      const { title, runs } = this.what;
      const [canvas, unit] = [element("canvas"), 20 * devicePixelRatio];
      const head = unit * (runs.length + 1.5);
      Object.assign(canvas, { width: drawn.width, height: drawn.height + head });
      const ctx = canvas.getContext("2d");
      ctx.fillStyle = css("--back");
      ctx.fillRect(0, 0, canvas.width, canvas.height);
      [{ label: title }, ...runs].forEach((one, n) => {
        ctx.fillStyle = n ? colour(one.n) : css("--ink");
        ctx.font = `${n ? "" : "600 "}${0.65 * unit}px system-ui, sans-serif`;
        ctx.fillText(one.label, unit / 2, unit * (n + 1));
      });
      ctx.drawImage(drawn, 0, head);
      canvas.toBlob((blob) => saveFile(`${title}.png`, blob));
    }

    swatch(background) {
      const piece = element("i", { class: "swatch" });
      piece.style.background = background;
      return piece;
    }

    key(event) {
      const { plot } = this;
      if (!plot) return;
      const xs = plot.data[0];
      const seen = xs.findIndex((x) => x >= plot.scales.x.min);
      const at = plot.cursor.idx === null || plot.cursor.idx === undefined ? seen : plot.cursor.idx;
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50 };
      if (event.key in steps || event.key === "Home" || event.key === "End") {
        let to = event.key === "Home" ? 0 : event.key === "End" ? xs.length - 1 : at + steps[event.key];
        to = Math.max(0, Math.min(xs.length - 1, to));
        plot.setCursor({ left: plot.valToPos(xs[to], "x"), top: 30 });
      } else if (event.key === "+" && this.what.onzoom) {
        const { min, max } = plot.scales.x;
        const width = (max - min) / 4;
        this.what.onzoom(Math.max(min, xs[at] - width), Math.min(max, xs[at] + width));
      } else if ((event.key === "-" || event.key === "Escape") && this.what.onzoom) {
        this.what.onzoom(null, null);
      } else return;
      event.preventDefault();
    }

    // One value of each run needs no axis.
    values(what) {
      const at = (line) => (what.by === "time" ? `after ${span(line.at_s[0])}` : `at step ${line.step[0]}`);
      const runs = what.runs.filter((run) => run.line.value.length);
      return `${runs.map((run) => `${run.label}${run.label && ": "}${number(run.line.value[0])} ${at(run.line)}`).join("; ")}.`;
    }

    words(what) {
      const last = what.runs.map((run) => {
        const values = run.line.value.filter((value) => value !== null);
        return values.length ? `${run.label} ends at ${number(values[values.length - 1])}` : `${run.label} has no value`;
      });
      return `${what.title} by ${what.by}. ${last.slice(0, MOST_ROWS).join(", ")}.`;
    }
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of charts) if (chart.what) chart.show(chart.what);
  });

  return { Chart, SHARES, element, number, span, colour, dash };
})();
