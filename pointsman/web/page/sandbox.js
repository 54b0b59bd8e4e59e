// The sandbox: sends the user's actions to the scheduler in the Python process, and shows the film that comes back.

"use strict";

const choices = JSON.parse(new TextDecoder().decode(carriedBytes($("choices"))));
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
const FIGURES = [
  ["steps", "steps", String], ["seconds", "time", seconds], ["finished", "requests finished", String],
  ["tokens_per_second", "tokens generated, a second", (value) => value.toFixed(1)],
  ["ttft_mean", "time to first token, mean", seconds], ["ttft_p99", "time to first token, 99th percentile", seconds],
  ["ttft_max", "time to first token, longest", seconds],
  ["longest_gap", "longest gap between two tokens of a request", seconds], ["preemptions", "preemptions", String],
  ["recomputed_tokens", "recomputed tokens", thousands], ["cached_tokens", "tokens found in the prefix cache", thousands],
];
const IN_ATTEMPTS = new Set(["preemptions", "recomputed_tokens", "tokens_per_second", "ttft_mean", "ttft_p99", "longest_gap"]);
const HAVE_A_SETTING = new Set(["watermark", "full-sequence"]); // reserves with a setting of their own; listing both would add them up
const MAX_ATTEMPTS = 50;
const IN_BRIEF = new Set(["seconds", "ttft_mean", "longest_gap", "preemptions"]); // always visible

let attempts = []; // complete runs of the same requests: {key, changed, figures}
let attempted = ""; // these requests
let answer = null; // the newest one
let isChanged = false; // whether settings were typed and not applied
let busy = Promise.resolve(); // one action after the other

const view = new View($("player"), { onProblem: problem });
view.part("reset").textContent = "⇤ Look at the first"; // the page has other buttons that step and reset
view.part("back").textContent = "◀ Look back";
view.part("step").textContent = "Look on ▶";

// ------------------------------------------------------------------------------------------------------------ asking

// The server's response; throws an error with its message if it refuses.
async function ask(path, body) {
  let response;
  try {
    const sent = body === undefined ? { method: "GET" } : { method: "POST", body: JSON.stringify(body) };
    response = await fetch(path, { ...sent, headers: { Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("the sandbox does not answer; start pointsman sandbox again, and open the address that it prints");
  }
  const text = await response.text();
  let found = null;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error(text.slice(0, 300) || `the sandbox answers ${response.status}`);
  }
  if (!response.ok || found.error !== undefined) throw new Error(found.error ?? `the sandbox answers ${response.status}`);
  return found;
}

// Performs one action, and shows the result; true: it was performed.
function perform(action) {
  const next = busy.then(async () => {
    try {
      await take(action === null ? await ask("state") : await ask("do", action));
      return true;
    } catch (error) {
      problem(error.message);
      return false;
    }
  });
  busy = next.then(() => {});
  return next;
}

// ------------------------------------------------------------------------------------------------------------ showing

async function take(found) {
  answer = found;
  problem(found.problem);
  const now = found.figures;
  const states = {};
  for (const one of found.requests) states[one.state] = (states[one.state] ?? 0) + 1;
  const counts = Object.entries(states).map(([state, count]) => `${count} ${state === "arrives" ? "yet to arrive" : state}`);
  $("status").textContent = `After ${counted(now.steps, "step")}, at ${seconds(now.seconds)}: ${counts.join(", ") || "no request"}.`;
  $("do-undo").textContent = found.undo === null ? "Undo" : `Undo: ${found.undo}`;
  $("do-redo").textContent = found.redo === null ? "Redo" : `Redo: ${found.redo}`;
  drawRequests(found.requests);
  drawSituation(found.situation);
  drawOutcome(now, found);
  noteAttempt(found);
  $("about").hidden = found.about === "";
  $("about").textContent = found.about;
  if (found.about !== "" && !$("situations").hidden) { // an opened recording: show its settings first
    $("situations").hidden = true;
    $("requests-card").before($("settings-card"));
  }
  $("empty").textContent = found.requests.length ? "No step has been scheduled yet. Press Run, or Step."
    : "No step has been scheduled yet. Begin with a situation, or add a request; then press Step, or Run.";
  $("save-film").disabled = found.film === null;
  if (!isChanged) drawSettings(found.settings);
  $("copy-label").hidden = true;
  $("copied").textContent = "";
  const chosen = view.chosen === null ? null : view.film.requests[view.chosen].id;
  $("empty").hidden = found.film !== null;
  $("player").hidden = found.film === null;
  if (found.film === null || !(await view.open(bytesOf(found.film), "the film of the sandbox"))) return;
  if (found.problem !== null) problem(found.problem);
  if (chosen !== null) view.choose(view.film.requests.findIndex((one) => one.id === chosen), false);
  view.drawLine();
  await view.show(Infinity);
}

function drawRequests(requests) {
  const focused = document.activeElement?.dataset.of ?? null;
  $("requests").replaceChildren(...requests.slice(0, MAX_ROWS).map(requestItem));
  if (requests.length > MAX_ROWS) $("requests").append(item(`and ${thousands(requests.length - MAX_ROWS)} more`));
  if (focused !== null) {
    const again = [...$("requests").querySelectorAll("[data-of]")].find((one) => one.dataset.of === focused);
    (again ?? $("add").querySelector("[name=prompt]")).focus();
  }
  const like = $("add").elements.like;
  const before = like.value;
  const names = requests.map((one) => Object.assign(document.createElement("option"), { value: one.id, textContent: one.id }));
  like.replaceChildren(Object.assign(document.createElement("option"), { value: "", textContent: "no other" }), ...names);
  like.value = requests.some((one) => one.id === before) ? before : "";
}

function requestItem(one) {
  const parts = [`${counted(one.prompt, "prompt token")}, ${thousands(one.output)} to generate`];
  if (one.like !== null) parts.push(`the first ${thousands(one.shared)} as in ${one.like}`);
  if (one.tenant) parts.push(`tenant ${one.tenant}`);
  if (one.state !== "arrives" && one.state !== "refused") parts.push(`${thousands(one.computed)} computed, ${thousands(one.generated)} generated`);
  if (one.preemptions) parts.push(`preempted ${one.preemptions === 1 ? "once" : `${one.preemptions} times`}`);
  if (one.ttft !== null) {
    const before = one.ttft_before === null ? "" : ` (before: ${seconds(one.ttft_before)})`;
    parts.push(`first token after ${seconds(one.ttft)}${before}`);
  }
  const name = document.createElement("button");
  name.className = "link";
  name.dataset.of = `show ${one.id}`;
  name.append(span("name", one.id));
  name.title = "Follow it in the steps below";
  name.addEventListener("click", () => {
    const found = view.film === null || $("player").hidden ? -1 : view.film.requests.findIndex((other) => other.id === one.id);
    if (found < 0) problem(`no step has ${one.id} yet`);
    else view.choose(found);
  });
  const found = item(name, span("state", ` ${one.state === "arrives" ? "yet to arrive" : one.state}`), span("why", ` ${parts.join("; ")}`));
  if (one.why !== "") {
    const why = document.createElement("p");
    why.textContent = one.why;
    found.append(why);
  }
  if (one.can_abort) found.append(" ", urgencyOf(one), " ", abortOf(one));
  return found;
}

function abortOf(one) {
  const button = document.createElement("button");
  button.textContent = one.state === "arrives" ? "Take away" : "Abort";
  button.setAttribute("aria-label", `${button.textContent} ${one.id}`);
  button.dataset.of = `abort ${one.id}`;
  button.addEventListener("click", () => perform({ do: "abort", id: one.id }));
  return button;
}

function urgencyOf(one) {
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "number", value: one.priority });
  input.setAttribute("aria-label", `Priority of ${one.id}`);
  input.dataset.of = `priority ${one.id}`;
  input.addEventListener("change", async () => {
    if (!(await perform({ do: "priority", id: one.id, priority: numberOf(input) }))) input.value = one.priority;
  });
  label.append("priority ", input);
  return label;
}

function drawSituation(name) {
  const found = choices.situations.find((one) => one.name === name);
  if (found !== undefined) $("situation").value = name;
  const shown = choices.situations.find((one) => one.name === $("situation").value);
  $("situation-about").textContent = shown.about;
  $("do-what-if").hidden = found === undefined || shown !== found;
  $("do-what-if").textContent = found?.what_if ?? "";
}

// before: figures of the same requests under the base settings, played as far; null: the settings are the same.
function drawOutcome(now, { before, before_is_over: isOver, changed }) {
  $("comparing").hidden = before === null;
  $("changes").textContent = `Before: the same requests under the settings of the beginning, ` +
    `${isOver ? "to their end" : `for the same number of steps`}. Changed since: ${changed.join("; ")}.`;
  const text = (value, write) => (value === null ? "none yet" : write(value));
  const differs = ([key]) => before !== null && IN_BRIEF.has(key) && now[key] !== before[key];
  const brief = FIGURES.filter(differs).map(([key, name, write]) => `${name} ${text(before[key], write)} → ${text(now[key], write)}`);
  $("brief").textContent = brief.length ? `Before and now: ${brief.join("; ")}.` : "";
  $("outcome").replaceChildren(...FIGURES.map(([key, name, write]) => {
    const box = document.createElement("div");
    box.append(Object.assign(document.createElement("dt"), { textContent: name }));
    box.append(Object.assign(document.createElement("dd"), { textContent: text(now[key], write) }));
    if (before !== null) {
      box.append(Object.assign(document.createElement("dd"), { className: "before", textContent: `before: ${text(before[key], write)}` }));
      if (now[key] !== before[key]) box.className = "differs";
    }
    return box;
  }));
}

// Keeps the outcome of each setting that was played to the end, for the current requests.
function noteAttempt(found) {
  const requests = JSON.stringify(found.requests.map((one) => [one.id, one.prompt, one.output, one.at, one.priority, one.state === "arrives"]));
  if (requests !== attempted) [attempts, attempted] = [[], requests];
  if (found.is_over && found.figures.steps > 0) {
    const key = JSON.stringify(found.settings);
    attempts = [...attempts.filter((one) => one.key !== key), { key, changed: found.changed, figures: found.figures }].slice(-MAX_ATTEMPTS);
  }
  $("attempts").hidden = attempts.length < 2;
  const text = (value, write) => (value === null ? "none" : write(value));
  $("tried").replaceChildren(
    tableRow("th", "changed since the beginning", ...FIGURES.filter(([key]) => IN_ATTEMPTS.has(key)).map(([, name]) => name)),
    ...attempts.map(({ changed, figures }) => tableRow("td", changed.join("; ") || "nothing",
      ...FIGURES.filter(([key]) => IN_ATTEMPTS.has(key)).map(([key, , write]) => text(figures[key], write)))));
}

// ------------------------------------------------------------------------------------------------------------ settings

const numberOf = (input) => (input.value.trim() === "" || Number.isNaN(input.valueAsNumber) ? input.value : input.valueAsNumber);

function labelled(text, control, hint) {
  const label = document.createElement("label");
  if (control.type === "checkbox") label.append(control, ` ${text}`);
  else label.append(`${text} `, control);
  if (hint) label.title = hint;
  return label;
}

function selected(names, value) {
  const select = document.createElement("select");
  for (const name of names) select.append(Object.assign(document.createElement("option"), { value: name, textContent: name || "the default" }));
  select.value = value;
  return select;
}

// "name:key=value,key=value" as name and parameters.
function parsed(text) {
  const at = text.indexOf(":");
  if (at < 0) return [text, {}];
  return [text.slice(0, at), Object.fromEntries(text.slice(at + 1).split(",").map((part) => [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)]))];
}

const boundsOf = ({ low, high }) => (low === null ? "" : ` (${low} ${high === null || high >= 2 ** 31 - 1 ? "or more" : `to ${high}`})`);

// The parameters of a policy: inputs, and the policy's text with their values.
function parametersOf(policy, given) {
  const box = document.createElement("div");
  box.className = "controls";
  const inputs = policy.parameters.map((one) => {
    const value = given[one.name] ?? String(one.default);
    const isNumber = typeof one.default === "number";
    const control = typeof one.default === "boolean" ? selected(["True", "False"], value === "true" ? "True" : value)
      : one.choices.length ? selected(one.choices.map(String), value)
      : Object.assign(document.createElement("input"), isNumber ? { type: "number", step: "any", value } : { type: "text", size: 12, value });
    box.append(labelled(`${one.name}${isNumber ? boundsOf(one) : ""}`, control, one.doc));
    return [one, control];
  });
  const written = () => {
    const parts = inputs.filter(([one, control]) => control.value !== "" && control.value !== String(one.default) && Number(control.value) !== one.default)
      .map(([one, control]) => `${one.name}=${control.value}`);
    return policy.name + (parts.length ? `:${parts.join(",")}` : "");
  };
  return [box, written];
}

// One policy of a kind.
function policyField(setting, value) {
  const policies = choices.policies[setting.policy];
  const field = document.createElement("fieldset");
  const select = selected([...(setting.optional ? [""] : []), ...policies.map((one) => one.name)], "");
  const about = span("why", "");
  let written = () => null;
  const [name, given] = value === null ? ["", {}] : parsed(value);
  const open = (chosen, parameters) => {
    const policy = policies.find((one) => one.name === chosen);
    about.textContent = policy?.about ?? "";
    const [box, write] = policy === undefined ? [null, () => null] : parametersOf(policy, parameters);
    written = write;
    field.replaceChildren(labelled(setting.label, select), ...(box ? [box] : []), about);
  };
  select.value = name;
  select.addEventListener("change", () => open(select.value, {}));
  open(name, given);
  return [field, () => written()];
}

// Any number of policies of a kind.
function policiesField(setting, values) {
  const field = document.createElement("fieldset");
  field.append(Object.assign(document.createElement("legend"), { textContent: setting.label }));
  const given = new Map(values.map(parsed));
  const policies = choices.policies[setting.policy].filter((one) => !HAVE_A_SETTING.has(one.name) || given.has(one.name));
  const fields = policies.map((policy) => {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: given.has(policy.name) });
    const [parameters, written] = parametersOf(policy, given.get(policy.name) ?? {});
    parameters.hidden = !box.checked;
    const about = span("why", policy.about);
    about.hidden = !box.checked;
    box.addEventListener("change", () => { parameters.hidden = about.hidden = !box.checked; });
    const row = document.createElement("div");
    row.append(labelled(policy.name, box, policy.about), parameters, about);
    field.append(row);
    return [box, written];
  });
  return [field, () => fields.filter(([box]) => box.checked).map(([, written]) => written())];
}

let readers = new Map(); // of each setting: reads its controls

function drawSettings(settings) {
  readers = new Map();
  const rows = choices.settings.map((setting) => {
    const value = settings[setting.name];
    let control;
    let read;
    if (setting.kind === "policy") [control, read] = policyField(setting, value);
    else if (setting.kind === "policies") [control, read] = policiesField(setting, value);
    else {
      if (setting.kind === "flag") {
        control = Object.assign(document.createElement("input"), { type: "checkbox", checked: value });
        read = () => control.checked;
      } else if (setting.kind === "choice") {
        control = selected(setting.choices.includes(value) ? setting.choices : [...setting.choices, value], value);
        read = () => control.value;
      } else {
        control = Object.assign(document.createElement("input"), { type: "number", min: setting.low, max: setting.high, step: setting.kind === "integer" ? 1 : "any", value });
        read = () => numberOf(control);
      }
      control.name = setting.name;
      const label = labelled(setting.label, control, `${setting.name}${boundsOf(setting)}`);
      readers.set(setting.name, read);
      const row = document.createElement("div");
      row.append(label);
      return row;
    }
    control.dataset.setting = setting.name;
    readers.set(setting.name, read);
    return control;
  });
  const isOther = (_, index) => choices.settings[index].kind === "policy" || choices.settings[index].policy === "limit" || choices.settings[index].name.startsWith("seconds");
  $("others").replaceChildren(...rows.filter(isOther));
  $("knobs").replaceChildren(...rows.filter((row, index) => !isOther(row, index)));
  noteChange(false);
}

function noteChange(is) {
  isChanged = is;
  $("changed").textContent = is ? "changed, not applied yet" : "";
}

async function apply() {
  const settings = {};
  for (const [name, read] of readers) {
    const value = read();
    if (JSON.stringify(value) !== JSON.stringify(answer.settings[name])) settings[name] = value;
  }
  noteChange(false);
  if (Object.keys(settings).length && !(await perform({ do: "settings", settings }))) noteChange(true);
}

// ------------------------------------------------------------------------------------------------------------ copying

// Whether the settings in the form have been played; reports it if not.
function isPlayed() {
  if (isChanged) problem("settings are changed and not played yet: press “Play again with these settings”, or discard them");
  return !isChanged;
}

async function copy(text, what) {
  if (!isPlayed()) return;
  $("copy-label").hidden = false;
  $("copy").value = text;
  try {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = `${what} copied.`;
  } catch {
    $("copy").focus();
    $("copy").select();
    $("copied").textContent = `The browser does not let a page copy; ${what} is selected below.`;
  }
}

function save(parts, name) {
  if (!isPlayed()) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(parts));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60e3);
}

async function saveCompared() {
  await busy;
  try {
    save([(await ask("compared")).page], "before-now.html");
  } catch (error) {
    problem(error.message);
  }
}

// ------------------------------------------------------------------------------------------------------------ beginning

function handleKey(event) {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  const key = event.key.toLowerCase();
  let action = null;
  if ((event.ctrlKey || event.metaKey) && !event.altKey) action = { z: event.shiftKey ? "redo" : "undo", y: "redo" }[key] ?? null;
  else if (!event.altKey) action = { s: "step", r: "run" }[key] ?? null;
  if (action !== null && !typing) {
    event.preventDefault();
    perform({ do: action });
  } else if (!$("player").hidden) view.handleKey(event);
}

function begin() {
  for (const one of choices.situations) $("situation").append(Object.assign(document.createElement("option"), { value: one.name, textContent: one.title }));
  const actions = { "do-step": { do: "step" }, "do-steps": { do: "step", count: 10 }, "do-run": { do: "run" }, "do-reset": { do: "reset" },
    "do-undo": { do: "undo" }, "do-redo": { do: "redo" }, "do-clear": { do: "clear" }, "do-what-if": { do: "what_if" },
    "do-compare": { do: "compare_from_here" } };
  for (const [id, action] of Object.entries(actions)) $(id).addEventListener("click", () => perform(action));
  $("situation").addEventListener("change", () => drawSituation(null));
  $("do-situation").addEventListener("click", () => {
    noteChange(false);
    perform({ do: "situation", name: $("situation").value });
  });
  $("add").addEventListener("submit", async (event) => {
    event.preventDefault();
    const { prompt, output, id, at, like, shared, priority, tenant, max_tokens: most } = event.target.elements;
    const action = { do: "add", prompt: numberOf(prompt), output: numberOf(output) };
    for (const input of [at, shared, priority, most]) if (input.value !== "") action[input.name] = numberOf(input);
    for (const input of [id, like, tenant]) if (input.value !== "") action[input.name] = input.value;
    if (await perform(action)) id.value = "";
  });
  for (const event of ["input", "change"]) $("settings").addEventListener(event, () => noteChange(true));
  $("settings").addEventListener("submit", (event) => { event.preventDefault(); apply(); });
  $("discard").addEventListener("click", () => drawSettings(answer.settings));
  $("copy-test").addEventListener("click", () => copy(answer.test, "The test"));
  $("copy-settings").addEventListener("click", () => copy(answer.commands.change, "What differs"));
  $("copy-all").addEventListener("click", () => copy(answer.commands.all, "Every setting"));
  $("save-film").addEventListener("click", () => save([bytesOf(answer.film)], "sandbox.film"));
  $("save-compared").addEventListener("click", saveCompared);
  document.addEventListener("keydown", handleKey);
  perform(null);
}

begin();
