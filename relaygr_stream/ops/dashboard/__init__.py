"""The fleet as a page for a browser: plain HTML and SVG, made by the process that serves it."""
