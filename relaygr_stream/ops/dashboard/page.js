// Replaces the live part every two seconds while the page is seen; says since when nothing came, if nothing comes.
const live = document.getElementById("live"), lost = document.getElementById("lost");
let last = new Date();
const refresh = async () => {
  if (document.hidden) return;
  try {
    const answer = await fetch("live", { signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    live.innerHTML = await answer.text();
    last = new Date();
    lost.hidden = true;
    live.classList.remove("old");
  } catch (error) {
    lost.textContent = `Nothing new since ${last.toLocaleTimeString()}: ${error.message}. What is shown is old.`;
    lost.hidden = false;
    live.classList.add("old");
  }
};
const again = async () => {
  await refresh();
  setTimeout(again, 2000);
};
setTimeout(again, 2000);
document.addEventListener("visibilitychange", refresh);
