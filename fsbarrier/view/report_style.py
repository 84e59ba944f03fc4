"""The style sheet of the report, with light and dark palettes, readable on a phone.

A chart of iterations that is wider than the page is scrolled to its right end, which shows the newest ones (`direction` of its box). The
grid values are repeated there, because those on the left are out of sight.
"""

STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--fg:#1c1d20;--muted:#62666d;--line:#e2e3e1;--train:#1f77b4;--test:#b5379a;--bad:#c62828;
--warn:#9a6200;--good:#1d7a3a;--c0:#9aa0a6;--c1:#7fa3c7;--c2:#3b7dd8;--c3:#9aa0a6;--c4:#38a3a5;--c5:#9aa0a6;--c6:#a55eea;
--c7:#8d99ae;--c8:#d9a441;--c9:#9aa0a6;--c10:#e8743b;--c11:#7a9e3a;--c12:#2f9e5b;--c13:#9aa0a6;--inside:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#141517;--card:#1c1e21;--fg:#e8e8e6;--muted:#9a9ea6;--line:#313439;
--train:#5aa9e6;--test:#e072c8;--bad:#ff6b6b;--warn:#e5b454;--good:#5fcf86;--c0:#6d7278;--c1:#6f93b8;--c2:#4f8fe8;
--c3:#6d7278;--c4:#3fb3b5;--c5:#6d7278;--c6:#b57bf0;--c7:#77839a;--c8:#e0b357;--c9:#6d7278;--c10:#ee8650;--c11:#92b84e;
--c12:#42b873;--c13:#6d7278;--inside:#101113}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 10px}
h3{font-size:14px;margin:14px 0 4px;font-weight:600}
p{margin:4px 0 10px;color:var(--muted);overflow-wrap:anywhere}
header{margin-bottom:16px}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;margin:14px 0}
.state{font-size:13px;font-weight:600;border:1px solid;border-radius:99px;padding:1px 10px;vertical-align:3px;white-space:nowrap}
.running,.finished{color:var(--good)}.stalled,.stopped{color:var(--warn)}.broken{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tiles b{display:block;font-size:20px;font-variant-numeric:tabular-nums}
small{color:var(--muted);font-size:12px;display:block}
.problems{list-style:none;margin:14px 0;padding:10px 14px;border-left:4px solid var(--bad);background:var(--card);overflow-wrap:anywhere}
.problems .said{color:var(--muted);font-family:ui-monospace,monospace;font-size:12px;padding-left:14px}
.scroll{overflow-x:auto}
.newest{direction:rtl}
svg text.again{display:none}
@media (max-width:720px){.newest svg text.again{display:inline}}
.chart svg{direction:ltr;min-width:680px;width:100%;height:auto;display:block}
svg text{fill:var(--muted);font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text.inside{fill:var(--inside)}
.grid{stroke:var(--line);stroke-width:1}
.mark{stroke:var(--warn);stroke-width:2;stroke-dasharray:5 4}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.curve.train{stroke:var(--train)}.curve.test{stroke:var(--test)}
.dot.train{fill:var(--train)}.dot.test{fill:var(--test)}
.pale{opacity:.25}.cut{opacity:.55}.pale.cut{opacity:.15}
.lost{stroke:var(--bad);stroke-width:3;fill:none}
.coordination{fill:var(--fg);background:var(--fg)}
.start{fill:var(--c6);background:var(--c6)}.load{fill:var(--c8);background:var(--c8)}.work{fill:var(--c12);background:var(--c12)}
.save{fill:var(--c2);background:var(--c2)}.wait{fill:var(--line);background:var(--line)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 8px;padding:0;font-size:13px;color:var(--muted)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
i.train{background:var(--train)}i.test{background:var(--test)}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;min-width:50%}
th,td{text-align:right;padding:3px 14px 3px 0;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--muted);font-weight:500}
.left{text-align:left}
td.left:last-child{white-space:normal;overflow-wrap:anywhere;min-width:200px}
@media (max-width:600px){main{padding:12px 8px 32px}section{padding:10px}th,td{padding-right:9px;font-size:12px}
td.left:last-child{min-width:140px}}
summary{cursor:pointer;color:var(--muted);margin:6px 0}
code{overflow-wrap:anywhere}
.sample{border-top:1px solid var(--line);padding:4px 0}
.sample summary b{color:var(--fg)}
pre{margin:0 0 8px;padding:8px 10px;background:var(--bg);border-radius:6px;font:13px/1.45 ui-monospace,monospace;
white-space:pre-wrap;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:12px;margin-top:20px;overflow-wrap:anywhere}
""" + "".join(f".p{index}{{fill:var(--c{index});background:var(--c{index})}}" for index in range(14))
