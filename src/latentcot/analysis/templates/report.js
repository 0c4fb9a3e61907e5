
for (const host of document.querySelectorAll("[data-token-view]")) {
  const data = document.getElementById(host.dataset.tokenView);
  LatentTokenView.mount(host, JSON.parse(data.textContent));
}
