// The course: shows one lesson at a time, with its films. The texts come with the page; the view shows the films.
//
// A link contains the place: #lesson=3&variant=2&step=7&request=C, lesson and variant counted from 1.

"use strict";

const KEPT = "pointsman-course"; // correctly answered questions, in localStorage
const lessons = JSON.parse(new TextDecoder().decode(carriedBytes($("lessons-data"))));
const keys = lessons.flatMap((one, lesson) => one.questions.map((_, index) => `${lesson}.${index}`));
const right = new Set(kept());
const at = { lesson: null, variant: 0 };
let opened = null; // the film in the view
let wanted = 0; // counts calls of choose: only the last one is shown
let opening = Promise.resolve();

// A page opened as a file may have no storage.
function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "[]").filter((key) => keys.includes(key));
  } catch {
    return [];
  }
}

function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify([...right]));
  } catch {
    // without storage, answers last as long as the page
  }
}

function remember(shown) {
  const where = new URLSearchParams({ lesson: at.lesson + 1, variant: at.variant + 1, step: shown.film.frames[shown.frame].step });
  if (shown.chosen !== null) where.set("request", shown.film.requests[shown.chosen].id);
  history.replaceState(null, "", `#${where}`);
}

const view = new View($("film"), { onProblem: problem, onShow: remember });

// ------------------------------------------------------------------------------------------------------ texts

// Text, with the parts between ` as code.
function plain(text) {
  return text.split("`").map((part, index) => {
    if (index % 2 === 0) return part;
    return Object.assign(document.createElement("code"), { textContent: part });
  });
}

function moment({ text, step, variant, request }) {
  const button = document.createElement("button");
  button.className = "moment";
  button.textContent = text;
  if (lessons[at.lesson].variants.length > 1) button.title = `of “${lessons[at.lesson].variants[variant].name}”`;
  button.addEventListener("click", () => {
    choose(variant, { step, request });
    const top = $("film").getBoundingClientRect().top;
    if (top > innerHeight / 2 || top < -innerHeight) $("film").scrollIntoView(); // one column: it is below the text
  });
  return button;
}

const nodes = (pieces) => pieces.flatMap((piece) => (typeof piece === "string" ? plain(piece) : [moment(piece)]));

function paragraph(...content) {
  const found = document.createElement("p");
  found.append(...content);
  return found;
}

// ------------------------------------------------------------------------------------------------------ a lesson

function open(number, { variant = 0, step = null, request = null, focus = true } = {}) {
  at.lesson = number;
  const lesson = lessons[number];
  $("lesson").textContent = `${number + 1}. ${lesson.title}`;
  document.title = `${number + 1}. ${lesson.title}`;
  $("paragraphs").replaceChildren(...lesson.paragraphs.map((pieces) => paragraph(...nodes(pieces))));
  $("choice").textContent = lesson.choice;
  $("variant").replaceChildren(...lesson.variants.map((one, index) =>
    Object.assign(document.createElement("option"), { value: index, textContent: one.name })));
  $("questions").replaceChildren(...lesson.questions.map((one, index) => question(one, `${number}.${index}`)));
  $("previous").disabled = number === 0;
  $("next").disabled = number + 1 === lessons.length;
  listLessons();
  choose(variant, { step, request });
  if (!focus) return;
  $("contents").open = false;
  scrollTo(0, 0);
  $("lesson").focus();
}

// Shows a variant's film at a step; null: at its first step.
function choose(variant, { step = null, request = null } = {}) {
  at.variant = variant;
  const { lesson } = at;
  $("variant").value = variant;
  $("shows").replaceChildren(...nodes(lessons[lesson].variants[variant].shows));
  const call = ++wanted;
  const id = `film-${lesson}-${variant}`;
  opening = opening.then(async () => {
    if (call !== wanted) return;
    if (opened !== id) {
      if (!(await view.open(carriedBytes($(id)), lessons[lesson].variants[variant].name))) return;
      opened = id;
      view.drawLine();
    }
    view.stop();
    view.choose(request === null ? null : view.film.requests.findIndex((one) => one.id === request), false);
    await view.showFrom(step);
  });
}

function listLessons() {
  const done = (number) => lessons[number].questions.every((_, index) => right.has(`${number}.${index}`));
  $("lessons").replaceChildren(...lessons.map((one, number) => {
    const link = Object.assign(document.createElement("a"), { href: `#lesson=${number + 1}`, textContent: one.title });
    if (number === at.lesson) link.setAttribute("aria-current", "page");
    return item(link, done(number) ? " ✓ answered" : "");
  }));
  $("where").textContent = `Lesson ${at.lesson + 1} of ${lessons.length}:`;
  $("progress").textContent = `${right.size} of ${keys.length} questions answered right`;
}

// ------------------------------------------------------------------------------------------------------ questions

function question({ text, answers }, key) {
  const found = document.createElement("fieldset");
  const legend = document.createElement("legend");
  legend.append(...plain(text));
  const verdict = document.createElement("p");
  verdict.setAttribute("role", "status");
  const choices = answers.map((answer) => {
    const label = document.createElement("label");
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: `answer-${key}` });
    radio.addEventListener("change", () => {
      verdict.className = answer.isRight ? "right" : "wrong";
      verdict.replaceChildren(span("name", answer.isRight ? "Right." : "Wrong."), " ", ...nodes(answer.why));
      if (!answer.isRight) return;
      right.add(key);
      keep();
      listLessons();
    });
    label.append(radio, " ", ...plain(answer.text));
    return label;
  });
  found.className = "card";
  found.append(legend, ...choices, verdict);
  return found;
}

// ------------------------------------------------------------------------------------------------------ the place

const within = (text, count) => Math.min(Math.max(Math.trunc(Number(text)) || 1, 1), count) - 1;

function follow(focus) {
  const where = new URLSearchParams(location.hash.slice(1));
  const lesson = within(where.get("lesson"), lessons.length);
  const variant = within(where.get("variant"), lessons[lesson].variants.length);
  const step = where.has("step") ? Number(where.get("step")) : null;
  open(lesson, { variant, step, request: where.get("request"), focus });
}

function begin() {
  document.addEventListener("keydown", (event) => view.handleKey(event));
  window.addEventListener("hashchange", () => follow(true));
  $("variant").addEventListener("change", () => choose(Number($("variant").value)));
  $("previous").addEventListener("click", () => open(at.lesson - 1));
  $("next").addEventListener("click", () => open(at.lesson + 1));
  $("contents").open = location.hash === "";
  follow(false);
}

begin();
