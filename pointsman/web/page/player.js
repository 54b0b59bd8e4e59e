// The page that plays a film: the one that it carries, or one that is opened or dropped on it.

"use strict";

function problem(text) {
  $("problem").hidden = text === null;
  $("problem").textContent = text ?? "";
}

// A link carries step and request.
function remember(view) {
  const where = new URLSearchParams({ step: view.step });
  if (view.chosen !== null) where.set("request", view.film.requests[view.chosen].id);
  history.replaceState(null, "", `#${where}`);
}

const view = new View($("player"), { onProblem: problem, onShow: remember });

async function open(buffer, name) {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (!(await view.open(buffer, name))) return;
  $("title").textContent = document.title = name;
  $("player").hidden = false;
  view.drawLine();
  if (wanted.has("request")) view.choose(view.film.requests.findIndex((one) => one.id === wanted.get("request")), false);
  await view.showFrom(wanted.has("step") ? Number(wanted.get("step")) : null);
}

function begin() {
  document.addEventListener("keydown", (event) => view.handleKey(event));
  const take = async (file) => file && open(await file.arrayBuffer(), file.name);
  $("file").addEventListener("change", () => take($("file").files[0]));
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("drop"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("drop"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    take(event.dataTransfer.files[0]);
  });
  const carried = $("film");
  if (carried === null) return;
  $("open").hidden = true;
  open(carriedBytes(carried), $("title").textContent);
}

begin();
