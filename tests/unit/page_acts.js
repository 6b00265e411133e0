// What a user would do with the page of a run, by keys and by mouse; run after its own script.
"use strict";
{
const canvas = document.querySelector("#lanes canvas"), told = document.getElementById("tip");
const box = () => canvas.getBoundingClientRect();
const pixels = () => canvas.toDataURL();
const seen = {}, all = pixels();
const key = (on, name) => on.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
key(canvas, "+");
seen.zoomed = pixels() !== all;
const near = pixels();
key(canvas, "ArrowLeft");
seen.moved = pixels() !== near;
key(canvas, "0");
seen.reset = pixels() === all;
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, clientX: box().left + 400, clientY: box().top + 30}));
seen.wheel = pixels() !== all;
[...document.querySelectorAll("#lanes button")].find((each) => each.textContent === "all").click();
seen.button = pixels() === all;
const wide = box().width - 130, last = facts.lanes.measured;
const span = last.spans.find((each) => each[0] === "compute" && each[3] - each[2] > last.end / 1000);
const at = box().left + 130 + wide * (span[2] + span[3]) / 2 / last.end;
canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: at, clientY: box().top + 22 + 17}));
seen.hover = told.textContent;
const curve = document.querySelector("#loss svg");
key(curve, "ArrowLeft");
seen.step = told.textContent;
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
}
