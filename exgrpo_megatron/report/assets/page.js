// Puts the page together.

function metricChooser(data) {
  const select = document.getElementById("metric"), log = document.getElementById("metric-log");
  const groups = new Map();
  for (const name of Object.keys(data.metrics).sort()) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  select.replaceChildren(...[...groups].map(([group, names]) => el("optgroup", { label: group }, ...names.map((name) => el("option", { value: name }, name)))));
  const draw = () => {
    const metric = data.metrics[select.value];
    const chart = lineChart({ title: select.value, unit: metric.unit, log: log.checked, free: true, width: 1200, height: 300, start: data.run.replay_start,
      empty: "no value that can be drawn", series: [{ name: metric.meaning, color: "var(--blue)", steps: metric.steps, values: metric.values }] });
    document.getElementById("metric-chart").replaceChildren(chart);
  };
  if (!groups.size) return;
  select.value = data.metrics["reward/pass_rate"] ? "reward/pass_rate" : select.options[0].value;
  select.addEventListener("input", draw);
  log.addEventListener("input", draw);
  draw();
}

function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  themeButton();
  const charts = overview(data).filter((chart) => !data.run.simulated || !chart.querySelector(".empty"));
  document.getElementById("charts").replaceChildren(...charts);
  document.getElementById("bucket-charts").replaceChildren(...bucketCharts(data));
  const table = new QuestionTable(data);
  metricChooser(data);
  const asked = /^#question-(\d+)$/.exec(location.hash);
  if (asked && Number(asked[1]) < data.questions.id.length) table.open(Number(asked[1]));
  document.documentElement.dataset.ready = "true";
}

start();
