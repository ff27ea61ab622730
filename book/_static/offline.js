// A page opened from disk may not read other pages, so there the search shows titles alone.
if (window.location.protocol === "file:") {
  document.addEventListener("DOMContentLoaded", () => {
    if (typeof DOCUMENTATION_OPTIONS !== "undefined") {
      DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
    }
  });
}
