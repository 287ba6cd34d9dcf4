"""The style sheet of the diagnose page: light and dark by the reader's preference, no fonts or files from elsewhere."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #ffffff; --ink: #1b1f24; --soft: #5b6570; --grid: #d5d9de; --line: #e4e6ea;
  --accent: #3f7fc4; --warm: #d9822b; --good: #2f9e73; --bad: #cf4a55; --violet: #7a5cc0; --paper-on-color: #fefefe;
  --shade: #f2f3f5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1b1f25; --ink: #e6e8eb; --soft: #9aa4af; --grid: #3a414a; --line: #2c323a;
    --accent: #6ea8e6; --warm: #e8a05a; --good: #5bc49a; --bad: #e8717b; --violet: #a48be0; --paper-on-color: #fefefe;
    --shade: #22272e;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 28px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 44px 0 4px; }
p { margin: 6px 0 12px; max-width: 78ch; }
.soft { color: var(--soft); }
.about { color: var(--soft); font-size: 13.5px; margin-bottom: 22px; }
code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
.verdict { background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--good);
  border-radius: 8px; padding: 18px 22px; }
.verdict.missed { border-left-color: var(--warm); }
.caution { margin: 0 0 12px; max-width: none; padding: 9px 14px; border-radius: 6px; font-weight: 600;
  background: color-mix(in srgb, var(--warm) 18%, transparent); border: 1px solid var(--warm); }
.verdict h2 { margin: 0 0 14px; font-size: 19px; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin: 0 0 16px; }
.tile { background: var(--shade); border-radius: 6px; padding: 10px 14px; }
.tile b { display: block; font-size: 22px; font-weight: 600; letter-spacing: -0.01em; }
.tile span { color: var(--soft); font-size: 12.5px; line-height: 1.35; display: block; }
dl { display: grid; grid-template-columns: 210px 1fr; gap: 8px 20px; margin: 0; }
dt { font-weight: 600; }
dd { margin: 0; }
figure { margin: 14px 0 6px; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 18px; }
figure svg { display: block; width: 100%; height: auto; max-width: 860px; margin: 0 auto; }
figure svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; margin: 12px 0; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 11px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; color: var(--soft); font-size: 12.5px; line-height: 1.35; vertical-align: bottom;
  background: var(--shade); white-space: normal; }
th:first-child, td:first-child, .left { text-align: left; }
td.text { white-space: normal; text-align: left; min-width: 290px; }
tr.chosen td { background: color-mix(in srgb, var(--good) 13%, transparent); }
.heat td.cell { text-align: center; padding: 4px 6px; }
.heat th { text-align: center; }
.heat th:first-child { text-align: left; }
.badge { display: inline-block; border-radius: 10px; padding: 0 9px; font-size: 12px; line-height: 19px;
  background: color-mix(in srgb, var(--tone) 20%, transparent); border: 1px solid var(--tone); white-space: nowrap; }
.routing { --tone: var(--violet); } .weights { --tone: var(--accent); }
.activations { --tone: var(--warm); } .engine { --tone: var(--soft); }
.context { color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
.token { color: var(--ink); background: color-mix(in srgb, var(--warm) 30%, transparent); border-radius: 3px;
  padding: 1px 3px; white-space: pre-wrap; }
details { margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 48px; border-top: 1px solid var(--line); padding-top: 14px; color: var(--soft); font-size: 13px; }
@media (max-width: 820px) { .tiles { grid-template-columns: repeat(2, 1fr); } dl { grid-template-columns: 1fr; } }
"""
