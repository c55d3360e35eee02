for (const box of document.querySelectorAll(".answers")) {
  const form = box.querySelector("form"), cards = [...box.querySelectorAll("article")];
  const filter = () => {
    const [text, arm, outcome] = ["text", "arm", "outcome"].map((name) => form.elements[name].value);
    const words = form.querySelector("input").value.toLowerCase();
    let shown = 0;
    for (const card of cards) {
      const inHead = card.querySelector("h4").textContent.toLowerCase().includes(words);
      let left = 0;
      for (const entry of card.querySelectorAll("li")) {
        const said = entry.querySelector("code").textContent.toLowerCase();
        const fits = (!text || card.dataset.text === text) && (!arm || entry.dataset.arm === arm) &&
          (!outcome || entry.className === "o-" + outcome) && (inHead || said.includes(words));
        entry.hidden = !fits;
        left += fits;
      }
      card.hidden = !left;
      shown += left;
    }
    form.querySelector("output").value = shown + " answers";
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
}
