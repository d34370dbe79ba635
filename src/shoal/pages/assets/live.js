"use strict";
// Keeps an open page of `shoal watch` current. Texts of the run reach the page as text nodes, or as sections of the
// page itself, which its server has escaped; the policy of the page forbids scripts in them.
(() => {
  const live = JSON.parse(document.getElementById("data").textContent).live;
  const said = document.getElementById("live-state");
  // In the order of the page. The curves stay: they grow by the rows of the stream.
  const SECTIONS = [".verdict", "#next", "#curves", "#time", "#profile", "#ranks", "#history", "#predicted", "#layout"];
  const KEPT = 20000;
  let isFetching = false;
  let isDue = false;
  let isDrawing = false;

  function drawSoon() {
    if (isDrawing || !window.shoalPage) return;
    isDrawing = true;
    requestAnimationFrame(() => { isDrawing = false; window.shoalPage.redraw(); });
  }

  const reload = () => setTimeout(() => location.reload(), 1000);

  // Points after the last one of a curve; those that it has are left out.
  function extend(curve, steps, values) {
    steps.forEach((step, index) => {
      if (curve[0].length && step <= curve[0][curve[0].length - 1]) return;
      curve[0].push(step);
      curve[1].push(values[index]);
    });
  }

  function addRows(rows) {
    const page = window.shoalPage;
    const keys = Object.keys(rows.columns).filter((key) => key !== "tokens" && key !== "step_seconds");
    if (keys.some((key) => !page || !page.found.charts.some((chart) => chart.key === key))) return reload();
    if (!page) return;
    const run = page.found.runs[0], axis = run.axis;
    for (const key of keys) extend((run.curves[key] = run.curves[key] || [[], []]), rows.steps, rows.columns[key]);
    if (rows.evaluations.length) {
      run.curves.eval_loss = run.curves.eval_loss || [[], []];
      extend(run.curves.eval_loss, rows.evaluations.map((pair) => pair[0]), rows.evaluations.map((pair) => pair[1]));
    }
    rows.steps.forEach((step, index) => {
      const last = axis.step.length - 1, before = last < 0 ? 0 : axis.step[last];
      if (step <= before) return;
      axis.step.push(step);
      axis.tokens.push(rows.columns.tokens[index] ?? step);
      axis.seconds.push((last < 0 ? 0 : axis.seconds[last]) + (rows.columns.step_seconds[index] || 0) * (step - before));
    });
    drawSoon();
    if (keys.some((key) => run.curves[key][0].length > KEPT)) refresh();
  }

  function showNow(lines) {
    lines.forEach(([, value, remark], index) => {
      const here = document.querySelectorAll("#live .fact")[index];
      if (!here) return;
      here.children[1].textContent = value;
      here.children[2].textContent = remark;
    });
    document.title = `${lines[0][1]} ${live.title}`;
  }

  // The page as it would be made now: its sections replace ours, and its curves, which have fewer points.
  async function refresh() {
    if (isFetching) { isDue = true; return; }
    isFetching = true;
    try {
      const answer = await fetch("/", { cache: "no-store" });
      if (answer.ok) swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch { /* the server has ended: the stream says so */ }
    isFetching = false;
    if (isDue) { isDue = false; setTimeout(refresh, 1000); }
  }

  function swap(made) {
    let last = null;
    for (const name of SECTIONS) {
      const mine = document.querySelector(name), theirs = name === "#curves" ? null : made.querySelector(name);
      const isOpen = mine ? [...mine.querySelectorAll("details")].map((each) => each.open) : [];
      if (mine && theirs) mine.replaceWith(theirs);
      else if (last && theirs) last.after(theirs); // it is new: a profile, or ranks that began to write
      last = theirs || mine || last;
      if (theirs) theirs.querySelectorAll("details").forEach((each, index) => { each.open = Boolean(isOpen[index]); });
    }
    if (!window.shoalPage) return;
    const run = window.shoalPage.found.runs[0], fresh = JSON.parse(made.getElementById("data").textContent).runs[0];
    for (const [key, curve] of Object.entries(run.curves)) if (fresh.curves[key]) extend(fresh.curves[key], ...curve);
    const after = fresh.axis.step[fresh.axis.step.length - 1] ?? 0;
    const rest = run.axis.step.findIndex((step) => step > after);
    if (rest >= 0) for (const key of ["step", "tokens", "seconds"]) fresh.axis[key].push(...run.axis[key].slice(rest));
    Object.assign(run, { curves: fresh.curves, axis: fresh.axis, marks: fresh.marks });
    drawSoon();
  }

  const stream = new EventSource(`/stream?after=${encodeURIComponent(live.cursor)}`);
  stream.addEventListener("open", () => { said.textContent = live.state; said.classList.remove("lost"); });
  stream.addEventListener("error", () => { said.textContent = "shoal watch has ended: this page no longer changes"; said.classList.add("lost"); });
  stream.addEventListener("rows", (event) => { const rows = JSON.parse(event.data); showNow(rows.now); addRows(rows); });
  stream.addEventListener("refresh", refresh);
  stream.addEventListener("again", () => { stream.close(); reload(); });
})();
