// The frontier: draws the curves, and reads the highest rate of each within the targets. The data is what
// `pointsman frontier --json` prints. The readings follow the rules of `highest_rate` and `at_rate` in sim/frontier.py.
//
// The address contains the targets in milliseconds: #ttft=500&itl=50&within=p99&itl-of=pooled

const data = JSON.parse(new TextDecoder().decode(Uint8Array.from(atob($("frontier-data").textContent), (char) => char.charCodeAt(0))));
const curves = data.curves.filter((curve) => curve.points.length);
const SVG = "http://www.w3.org/2000/svg";
const KINDS = { pooled: "the gaps of all requests", request: "the mean gap of a request", gap: "the longest gap of a request" };
const STEPS = 1000; // of a slider; its last step means no target
const state = { ttft: data.targets.ttft, itl: data.targets.itl, percentile: data.percentile, kind: data.targets.itl_of };
let waiting; // the timer after which the address is written
let dragged = null; // the latency whose target line is dragged

function $(id) {
  return document.getElementById(id);
}

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// ------------------------------------------------------------------------------------------------------ reading

// [value, low, high] of a latency at each point; null: it has none there.
function bands(curve, latency, percentile = state.percentile) {
  return curve.points.map((point) => (latency === "ttft" ? point.ttft : point.itl[state.kind])[percentile] ?? null);
}

// The rate at which rising values reach the target; 0: even the lowest rate misses it, infinite: all rates meet it.
function rateWithin(rates, values, target) {
  let highest = -Infinity;
  const rising = values.map((value) => (highest = Math.max(highest, value)));
  const place = rising.findIndex((value) => value > target);
  if (place <= 0) return place === 0 ? 0 : Infinity;
  const [before, after] = [rising[place - 1], rising[place]];
  const share = Number.isFinite(after) ? Math.log(target / before) / Math.log(after / before) : 0;
  return rates[place - 1] * (rates[place] / rates[place - 1]) ** share;
}

function reading(curve) {
  const rates = curve.points.map((point) => point.rate);
  const found = { value: Infinity, low: Infinity, high: Infinity, limit: null };
  if (curve.saturation) {
    const [value, low, high] = curve.saturation;
    Object.assign(found, { value, low, high, limit: "queue" });
  }
  for (const latency of ["ttft", "itl"]) {
    const target = state[latency];
    const known = bands(curve, latency);
    if (target === null || known.every((each) => each === null)) continue;
    const [value, low, high] = [0, 2, 1].map((end) => rateWithin(rates, known.map((each) => each?.[end] ?? Infinity), target));
    if (value < found.value) found.limit = latency;
    Object.assign(found, { value: Math.min(found.value, value), low: Math.min(found.low, low), high: Math.min(found.high, high) });
  }
  return found;
}

// A figure of the points at a rate, interpolated on logarithmic scales; null: not known.
function atRate(curve, values, rate) {
  if (values.some((value) => value === null)) return null;
  const rates = curve.points.map((point) => point.rate);
  const place = rates.findIndex((each) => each >= rate);
  if (place === 0 || place < 0) return values.at(place);
  const share = Math.log(rate / rates[place - 1]) / Math.log(rates[place] / rates[place - 1]);
  const [before, after] = [values[place - 1], values[place]].map((value) => Math.max(value, 1e-300));
  return before * (after / before) ** share;
}

// ------------------------------------------------------------------------------------------------------ words

// Numbers with as many digits as their interval supports, see digits_text in sim/crossing.py.
function digits(value, low, high) {
  let half = Number.isFinite(high) ? Math.max((high - low) / 2, 0) : value;
  if (half <= 0) half = Math.abs(value) * 0.01;
  if (half <= 0) return ["0", "0", "0"];
  let place = Math.floor(Math.log10(half));
  if (value > 0) place = Math.min(place, Math.floor(Math.log10(value)));
  const scale = 10 ** place;
  const decimals = Math.max(0, -place);
  return [value, low, high].map((each) => number(Number.isFinite(each) ? Math.round(each / scale) * scale : each, decimals));
}

function number(value, decimals) {
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function short(value) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: 3 });
}

function duration(seconds) {
  return seconds >= 1 ? `${short(seconds)} s` : `${short(1e3 * seconds)} ms`;
}

function rateText(curve, found) {
  const [first, last] = [curve.points[0].rate, curve.points.at(-1).rate];
  if (found.value === 0) return [`below ${short(first)}`, "even the lowest rate misses"];
  if (found.value === Infinity) return [`above ${short(last)}`, "even the highest rate meets"];
  const [value, low, high] = digits(found.value, found.low, found.high);
  return [value, `${found.low > 0 ? low : `below ${short(first)}`} to ${found.high < Infinity ? high : `above ${short(last)}`}`];
}

const COLUMNS = [
  ["output tokens/s", (point) => point.output_tokens_per_second, (value) => number(value, 0)],
  ["price per M prompt tokens", (point) => point.cost.price_per_million_prompt_tokens, short],
  ["price per M output tokens", (point) => point.cost.price_per_million_output_tokens, short],
  ["power", (point) => point.cost.watts, (value) => `${number(value, 0)} W`],
  ["kWh per M tokens", (point) => point.cost.joules_per_million_tokens, (value) => short(value / 3.6e6)],
].filter(([, read]) => curves.some((curve) => curve.points.every((point) => read(point) !== null)));

function name(curve) {
  const cell = element("th", "", { scope: "row" });
  const place = curves.indexOf(curve);
  cell.append(element("i", "", { class: `swatch c${place}`, "aria-hidden": "true" }), curve.name);
  return cell;
}

function itlName() {
  return { pooled: "ITL", request: "TPOT", gap: "longest gap" }[state.kind];
}

function showReadings(found) {
  const head = element("tr");
  for (const title of ["", `requests/s (${100 * data.confidence} %)`, "limited by", ...COLUMNS.map(([title]) => title)]) {
    head.append(element("th", title, { scope: "col" }));
  }
  const rows = curves.map((curve, place) => {
    const row = element("tr");
    const [value, interval] = rateText(curve, found[place]);
    const limit = { ttft: "TTFT", itl: itlName(), queue: "growing queue" }[found[place].limit] ?? "–";
    const answer = element("td", value, { class: "answer" });
    answer.append(element("small", interval));
    row.append(name(curve), answer, element("td", limit));
    const isBetween = found[place].value > 0 && found[place].value < Infinity;
    for (const [, read, text] of COLUMNS) {
      const figure = isBetween ? atRate(curve, curve.points.map(read), found[place].value) : null;
      row.append(element("td", figure === null ? "–" : text(figure)));
    }
    return row;
  });
  $("readings").replaceChildren(head, ...rows);
  $("spoken").textContent = curves.map((curve, place) => `${curve.name}: ${rateText(curve, found[place])[0]} requests a second`).join("; ");
  const limits = ["ttft", "itl"].filter((latency) => state[latency] !== null);
  const texts = limits.map((latency) => `${latency === "ttft" ? "TTFT" : itlName()} at most ${duration(state[latency])}`);
  const share = Number(state.percentile.slice(1));
  $("about-readings").textContent = texts.length ? `${texts.join(", and ")}, for ${share} % of ${share === 50 ? "the values (the median)" : "the values"}.` : "No target is set.";
}

function showPoints() {
  const head = element("tr");
  for (const title of ["", "requests/s", "TTFT p50", "TTFT p99", `${itlName()} p50`, `${itlName()} p99`, "output tokens/s", "busy"]) head.append(element("th", title, { scope: "col" }));
  const rows = curves.flatMap((curve) =>
    curve.points.map((point, index) => {
      const row = element("tr");
      row.append(name(curve), element("td", `${short(point.rate)}${point.is_overloaded ? " *" : ""}`));
      for (const latency of ["ttft", "itl"]) {
        for (const percentile of ["p50", "p99"]) {
          const band = bands(curve, latency, percentile)[index];
          row.append(element("td", band === null ? "–" : `${duration(band[0])} (${duration(band[1])} – ${duration(band[2])})`));
        }
      }
      row.append(element("td", number(point.output_tokens_per_second, 0)), element("td", `${number(100 * point.busy, 0)} %`));
      return row;
    }),
  );
  $("points").replaceChildren(head, ...rows);
}

// ------------------------------------------------------------------------------------------------------ charts

// The ends of the axes: rates a little beyond the last one without overload, latencies of all percentiles there.
const steady = curves.map((curve) => curve.points.filter((point) => !point.is_overloaded));
const maxRate = 1.15 * Math.max(...curves.map((curve, place) => (steady[place].length ? steady[place] : curve.points).at(-1).rate));

function range(latency) {
  const values = curves.flatMap((curve) => curve.points).filter((point) => !point.is_overloaded || !steady.flat().length);
  const all = values.flatMap((point) => (latency === "ttft" ? [point.ttft] : Object.values(point.itl)).flatMap((each) => Object.values(each).map((band) => band[0])));
  const target = data.targets[latency];
  const known = target === null ? all : [...all, target];
  return known.length ? [Math.min(...known) / 1.5, Math.max(...known) * 4] : [1e-3, 1];
}

const ranges = { ttft: range("ttft"), itl: range("itl") };

function ticks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
  }
  const inside = found.filter((tick) => tick >= low && tick <= high);
  return inside.length <= 7 ? inside : inside.filter((tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9);
}

function linearTicks(high) {
  const step = [1, 2, 5, 10].map((digit) => digit * 10 ** Math.floor(Math.log10(high / 4))).find((each) => high / each <= 5);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, index) => index * step);
}

function draw(latency, found) {
  const box = $(`${latency}-chart`);
  const width = Math.max(260, box.clientWidth), height = Math.round(Math.min(340, Math.max(220, 0.62 * width)));
  const [left, right, top, bottom] = [58, width - 8, 8, height - 36];
  const [low, high] = ranges[latency];
  const across = (rate) => left + (rate / maxRate) * (right - left);
  const up = (value) => bottom - (Math.log(Math.max(value, low / 1e3) / low) / Math.log(high / low)) * (bottom - top);
  const title = `${latency === "ttft" ? "TTFT" : itlName()}, ${state.percentile}`;
  $(`${latency}-title`).textContent = title;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title} over the request rate` });
  const clip = shape("clipPath", { id: `${latency}-clip` });
  clip.append(shape("rect", { x: left, y: top, width: right - left, height: bottom - top }));
  svg.append(clip);
  for (const tick of ticks(low, high)) {
    svg.append(shape("path", { class: "grid", d: `M${left} ${up(tick)}H${right}` }));
    svg.append(shape("text", { x: left - 6, y: up(tick) + 4, "text-anchor": "end" }, duration(tick)));
  }
  for (const tick of linearTicks(maxRate)) {
    svg.append(shape("path", { class: "grid", d: `M${across(tick)} ${top}V${bottom}` }));
    svg.append(shape("text", { x: across(tick), y: bottom + 15, "text-anchor": "middle" }, short(tick)));
  }
  svg.append(shape("text", { x: right, y: bottom + 31, "text-anchor": "end" }, "requests/s"));
  const inside = shape("g", { "clip-path": `url(#${latency}-clip)` });
  svg.append(inside);
  const line = (points) => (points.length > 1 ? `M${points.map(([rate, value]) => `${across(rate).toFixed(1)} ${up(value).toFixed(1)}`).join("L")}` : "");
  curves.forEach((curve, place) => {
    const known = bands(curve, latency).map((band, index) => ({ band, point: curve.points[index] })).filter(({ band }) => band !== null);
    const end = (index) => known.map(({ band, point }) => [point.rate, band[index]]);
    if (known.length > 1) inside.append(shape("path", { class: `band c${place}`, d: `${line([...end(2), ...end(1).reverse()])}Z` }));
    const first = known.findIndex(({ point }) => point.is_overloaded);
    const values = end(0);
    inside.append(shape("path", { class: `curve c${place}`, d: line(first < 0 ? values : values.slice(0, first)) }));
    if (first >= 0) inside.append(shape("path", { class: `curve beyond c${place}`, d: line(values.slice(Math.max(0, first - 1))) }));
    for (const [rate, value] of values) inside.append(shape("circle", { class: `c${place}`, cx: across(rate), cy: up(value), r: 2.5 }));
    const rate = found[place].value;
    if (rate > 0 && rate <= maxRate) inside.append(shape("path", { class: `mark c${place}`, d: `M${across(rate)} ${top}V${bottom}` }));
  });
  const target = state[latency];
  if (target !== null) {
    const y = Math.min(bottom, Math.max(top, up(target)));
    svg.append(shape("path", { class: "goal", d: `M${left} ${y}H${right}` }), shape("path", { class: "grip", d: `M${left} ${y}H${right}` }));
    svg.append(shape("text", { class: "goal-text", x: left + 6, y: y < top + 20 ? y + 14 : y - 5 }, `target ${duration(target)}`));
  }
  const toTarget = (event) => {
    const place = svg.getBoundingClientRect();
    const y = ((event.clientY - place.top) * height) / place.height;
    const share = Math.min(1, Math.max(0, (bottom - y) / (bottom - top)));
    set(latency, rounded(low * (high / low) ** share));
  };
  svg.addEventListener("pointerdown", (event) => {
    dragged = { latency, toTarget };
    toTarget(event);
    event.preventDefault();
  });
  box.replaceChildren(svg);
  if (dragged?.latency === latency) dragged.toTarget = toTarget;
}

addEventListener("pointermove", (event) => dragged?.toTarget(event));
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (dragged = null));

// ------------------------------------------------------------------------------------------------------ targets

// Two digits, so that sliders and lines give readable targets.
function rounded(value) {
  return Number(value.toPrecision(2));
}

function fromSlider(latency, step) {
  if (step >= STEPS) return null;
  const [low, high] = ranges[latency];
  return rounded(low * (high / low) ** (step / (STEPS - 1)));
}

function toSlider(latency, value) {
  if (value === null) return STEPS;
  const [low, high] = ranges[latency];
  return Math.round(Math.min(1, Math.max(0, Math.log(value / low) / Math.log(high / low))) * (STEPS - 1));
}

function set(latency, value) {
  state[latency] = value;
  show();
}

function show(source = null) {
  for (const latency of ["ttft", "itl"]) {
    const [slider, field] = [$(latency), $(`${latency}-ms`)];
    const text = state[latency] === null ? "no target" : duration(state[latency]);
    if (source !== slider) slider.value = toSlider(latency, state[latency]);
    slider.setAttribute("aria-valuetext", text);
    if (source !== field) field.value = state[latency] === null ? "" : Number((1e3 * state[latency]).toPrecision(6));
  }
  const found = curves.map(reading);
  showReadings(found);
  draw("ttft", found);
  draw("itl", found);
  clearTimeout(waiting);
  waiting = setTimeout(writeAddress, 150); // browsers limit how often an address changes
}

function writeAddress() {
  const where = new URLSearchParams();
  for (const latency of ["ttft", "itl"]) where.set(latency, state[latency] === null ? "none" : Number((1e3 * state[latency]).toPrecision(6)));
  where.set("within", state.percentile);
  where.set("itl-of", state.kind);
  history.replaceState(null, "", `#${where}`);
}

function readAddress() {
  const where = new URLSearchParams(location.hash.slice(1));
  for (const latency of ["ttft", "itl"]) {
    const text = where.get(latency);
    if (text === "none") state[latency] = null;
    else if (text !== null && Number(text) > 0 && Number.isFinite(Number(text))) state[latency] = Number(text) / 1e3;
  }
  if (data.curves[0]?.points[0]?.ttft[where.get("within")]) state.percentile = where.get("within");
  if (Object.hasOwn(KINDS, where.get("itl-of") ?? "")) state.kind = where.get("itl-of");
  $("percentile").value = state.percentile;
  $("kind").value = state.kind;
}

for (const latency of ["ttft", "itl"]) {
  $(latency).addEventListener("input", () => {
    state[latency] = fromSlider(latency, Number($(latency).value));
    show($(latency));
  });
  $(`${latency}-ms`).addEventListener("input", () => {
    const value = Number($(`${latency}-ms`).value) / 1e3;
    state[latency] = value > 0 ? value : null;
    show($(`${latency}-ms`));
  });
}
for (const percentile of ["p50", "p90", "p95", "p99"]) $("percentile").append(element("option", `${percentile.slice(1)} % (${percentile})`, { value: percentile }));
for (const [kind, text] of Object.entries(KINDS)) $("kind").append(element("option", text, { value: kind }));
$("percentile").addEventListener("change", () => ((state.percentile = $("percentile").value), show()));
$("kind").addEventListener("change", () => ((state.kind = $("kind").value), show(), showPoints()));
$("legend").textContent = `Line: the percentile. Band: its ${100 * data.confidence} % interval. Dotted: the queue grows without end, so latencies depend on the length of the simulation. Vertical lines: the readings.`;
$("notes").append(...data.notes.map((note) => element("p", note)));
addEventListener("hashchange", () => (readAddress(), show(), showPoints()));
let width = innerWidth; // on phones, scrolling resizes the height
addEventListener("resize", () => {
  if (innerWidth !== width) show();
  width = innerWidth;
});
readAddress();
showPoints();
show();
