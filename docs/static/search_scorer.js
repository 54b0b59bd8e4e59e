// Order of search results: pages whose title has the words of the question, then guides; names of the API and decision
// records last.
const askedWords = (new URLSearchParams(window.location.search).get("q") || "")
  .toLowerCase()
  .split(/\W+/)
  .filter((word) => word.length > 3)
  .map((word) => word.slice(0, Math.max(4, word.length - 3)));

var Scorer = {
  score: (result) => {
    const [docname, title, anchor, description, score] = result;
    const inTitle = askedWords.filter((word) => title.toLowerCase().includes(word)).length;
    if (docname.startsWith("decisions/") || docname.startsWith("reference/api/")) return score - 20;
    return score + 40 * inTitle + (/^(guides|start)\//.test(docname) ? 30 : 0);
  },
  objNameMatch: 3,
  objPartialMatch: 2,
  objPrio: { 0: 5, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
