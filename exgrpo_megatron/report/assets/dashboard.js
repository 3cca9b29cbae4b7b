// The charts of the overview and of the buckets.

const TIMES = [["draw", "var(--grey)"], ["select", "var(--violet)"], ["rollout", "var(--blue)"], ["reward", "var(--green)"], ["old_logprobs", "var(--amber)"], ["update", "var(--orange)"], ["replay_step", "var(--red)"], ["push", "var(--pink)"], ["record", "var(--teal)"]];

/** A metric as a series; nothing where the run has not written it. */
function series(data, name, style) {
  const metric = data.metrics[name];
  return metric ? { steps: metric.steps, values: metric.values, ...style } : null;
}

function smooth(one, weight) {
  if (!one) return null;
  let mean = null;
  return { ...one, values: one.values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  }) };
}

function overview(data) {
  const run = data.run, start = run.replay_start, get = (name, style) => series(data, name, style);
  const without = run.replay ? "nothing recorded" : "replay is off";
  const fresh = get("reward/pass_rate_fresh", { name: "new answers", color: "var(--orange)" });
  const lines = run.start_pass_rate === null ? [] : [{ y: run.start_pass_rate, name: `replay starts above ${percent(run.start_pass_rate)}`, color: "var(--green)" }];
  const low = get("ratio_replayed/p01", {}), high = get("ratio_replayed/p99", {});
  const replayed = get("experience/replayed_questions", { name: "achieved", color: "var(--blue)" });
  const share = replayed && { ...replayed, values: replayed.values.map((value) => (value === null ? null : value / run.batch)) };
  return [
    lineChart({ title: "Pass rate", y: [0, 1], format: percent, start, lines, series: [
      fresh && { ...fresh, thin: true }, smooth(fresh && { ...fresh, name: "new answers, smoothed" }, 0.25),
      get("validation/pass_rate_t1", { name: `held out, T=${run.temperature}`, color: "var(--ink)", dots: true }),
      get("validation/pass_rate_greedy", { name: "held out, greedy", color: "var(--grey)", dots: true, dash: true })] }),
    lineChart({ title: "Experience", unit: "questions", start, empty: without, series: [
      get("experience/buffer_questions", { name: "in the buffer", color: "var(--blue)" }),
      get("experience/retired", { name: "retired", color: "var(--green)" })] }),
    lineChart({ title: "Stored answers", start, empty: without, series: [get("experience/stored_answers", { name: "answers", color: "var(--amber)" })] }),
    lineChart({ title: "Share of the batch that is replayed", y: [0, 1], format: percent, start, empty: without, series: [share],
      lines: run.replay ? [{ y: run.replay_ratio, name: `experience.replay_ratio ${percent(run.replay_ratio)}`, color: "var(--grey)" }] : [] }),
    lineChart({ title: "Ratio of replayed tokens, new / recorded", log: true, start, empty: without, lines: [{ y: 1, name: "unchanged", color: "var(--grey)" }], series: [
      low && high && { name: "1% to 99%", color: "var(--orange)", steps: low.steps, low: low.values, high: high.values },
      get("ratio_replayed/p50", { name: "median", color: "var(--orange)" }),
      get("ratio_replayed/max", { name: "largest", color: "var(--ink)", dotsOnly: true })] }),
    stackChart({ title: "Groups of the step", y: [0, 1], format: percent, start, series: [
      get("groups/none_correct", { name: "none correct", color: "var(--rose)" }),
      get("groups/mixed", { name: "mixed (gives a gradient)", color: "var(--straw)" }),
      get("groups/all_correct", { name: "all correct", color: "var(--mint)" })] }),
    lineChart({ title: "Mean token entropy", unit: "nats", start, series: [get("policy/entropy", { name: "entropy", color: "var(--violet)" })] }),
    lineChart({ title: "Response length", unit: "tokens", start, series: [
      get("rollout/response_length", { name: "new answers", color: "var(--teal)" }),
      get("validation/response_length", { name: "held out", color: "var(--ink)", dots: true })] }),
    lineChart({ title: "Gradient norm and largest ratios", log: true, start, lines: data.metrics["policy/grad_norm"] ? [{ y: run.max_grad_norm, name: `clipped to ${run.max_grad_norm}`, color: "var(--grey)" }] : [], series: [
      get("policy/grad_norm", { name: "gradient norm", color: "var(--ink)" }),
      get("ratio_fresh/max", { name: "ratio, new tokens", color: "var(--blue)" }),
      get("ratio_replayed/max", { name: "ratio, replayed tokens", color: "var(--orange)" })] }),
    lineChart({ title: "New questions left for an epoch", unit: "questions", start, series: [get("data/questions_left", { name: "left", color: "var(--green)" })] }),
    lineChart({ title: "Age of replayed answers", unit: "steps", start, empty: without, series: [get("experience/mean_age_steps", { name: "mean", color: "var(--pink)" })] }),
    ...replayStepCharts(data),
    stackChart({ title: "Time of a step", unit: "s", start, series: TIMES.map(([name, color]) => get(`time/${name}_s`, { name: name.replace("_", " "), color })) }),
  ];
}

/** Of runs with optimiser steps on stored answers alone. */
function replayStepCharts(data) {
  if (!data.metrics["replay_step/answers"]) return [];
  const get = (name, style) => series(data, name, style), low = get("ratio_replay_step/p01", {}), high = get("ratio_replay_step/p99", {});
  return [
    lineChart({ title: "Replay steps: stored answers trained on", series: [get("replay_step/answers", { name: "answers", color: "var(--violet)" })] }),
    lineChart({ title: "Replay steps: ratio, new / recorded", log: true, lines: [{ y: 1, name: "unchanged", color: "var(--grey)" }], series: [
      low && high && { name: "1% to 99%", color: "var(--violet)", steps: low.steps, low: low.values, high: high.values },
      get("ratio_replay_step/p50", { name: "median", color: "var(--violet)" })] }),
    lineChart({ title: "Replay steps: weight of an answer", y: [0, null], series: [get("replay_step/mean_weight", { name: "mean", color: "var(--teal)" })] }),
  ];
}

function bucketCharts(data) {
  const count = data.run.group_size - 1, rows = [];
  for (let k = 1; k <= count; k++) {
    const one = series(data, `experience/bucket_${k}`, {});
    if (one) rows.push({ name: `k = ${k}`, steps: one.steps, values: one.values });
  }
  if (!rows.length) return [emptyChart("Buckets", data.run.replay ? "no step yet" : "replay is off: there are no buckets")];
  const steps = rows[0].steps, largest = Math.max(...rows.map((row) => row.values.reduce((a, b) => Math.max(a, b || 0), 0)));
  const bars = barChart({ title: "Questions by number correct", unit: `of K = ${data.run.group_size}`, count, largest, width: 640, height: 250, xLabel: "correct of K in the latest group" });
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Step of the bars" });
  const shown = el("output", {});
  const update = () => {
    const i = Number(slider.value);
    shown.textContent = `step ${steps[i]}`;
    slider.setAttribute("aria-valuetext", shown.textContent);
    bars.update(rows.map((row) => row.values[i]));
  };
  slider.addEventListener("input", update);
  update();
  bars.figure.insertBefore(el("div", { class: "slider" }, shown, slider), bars.legend);
  bars.legend.remove();
  const heat = heatChart({ title: "Questions in the buffer", unit: "correct of K over steps", steps, rows, width: 640, height: 250, start: data.run.replay_start,
    onstep: (i) => { slider.value = i; update(); } });
  return [heat, bars.figure];
}
