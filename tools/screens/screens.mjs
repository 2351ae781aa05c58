// Opens the status page in Chromium at the sizes of a desk and of a phone, light and dark: saves pictures,
// checks them by axe, and measures what an open page costs.
//
//     node screens.mjs CHROMIUM URL FOLDER PID ROUNDS SECONDS
//
// PID is the driver's. Each round is so many seconds with the page open, and so many without. Prints one
// JSON object: "violations" and "checked" (how many rules axe applied) by picture, "requests" to other
// addresses, "errors" of the page, "page_percent", the share of a core that the page itself takes, and the
// CPU seconds of the driver in each round, "open_s" and "closed_s".
import {createRequire} from "node:module";
import {readFileSync} from "node:fs";
import puppeteer from "puppeteer-core";
import sharp from "sharp";

const [chromium, url, folder, pid, rounds, seconds] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const SIZES = {
  desktop: {width: 1280, height: 1010},
  phone: {width: 390, height: 844, isMobile: true, hasTouch: true},
};
const TICKS_A_SECOND = 100, COLOURS = 64;

const result = {violations: {}, checked: {}, requests: [], errors: [], open_s: [], closed_s: []};
const sleep = () => new Promise(resolve => setTimeout(resolve, 1000 * seconds));

function cpuSeconds() {
  const fields = readFileSync(`/proc/${pid}/stat`, "utf8").replace(/^.*\) /s, "").split(" ");
  return (Number(fields[11]) + Number(fields[12])) / TICKS_A_SECOND;
}

async function open(page) {
  await page.goto(url, {waitUntil: "networkidle0"});
  await page.waitForSelector("#queries h2");
}

async function measure(page) {
  let busy = 0, elapsed = 0;
  for (let round = 0; round < rounds; round++) {
    await page.goto("about:blank");
    const closed = cpuSeconds();
    await sleep();
    result.closed_s.push(cpuSeconds() - closed);
    await open(page);
    const before = await page.metrics(), opened = cpuSeconds();
    await sleep();
    const after = await page.metrics();
    result.open_s.push(cpuSeconds() - opened);
    busy += after.TaskDuration - before.TaskDuration;
    elapsed += after.Timestamp - before.Timestamp;
  }
  result.page_percent = 100 * busy / elapsed;
}

async function picture(page, name) {
  const isWide = await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth");
  if (isWide) result.errors.push(`${name}: the page is wider than the screen`);
  await sharp(await page.screenshot()).png({palette: true, colours: COLOURS, effort: 10}).toFile(`${folder}/${name}.png`);
}

async function check(page, name) {
  // The page's own policy lets no other script run; the debugger may.
  await page.evaluate(axe);
  const {violations, passes} = await page.evaluate("axe.run()");
  result.checked[name] = passes.length + violations.length;
  result.violations[name] = violations.map(violation => `${violation.impact}: ${violation.id}: ${violation.nodes[0].html.slice(0, 200)}`);
}

const browser = await puppeteer.launch({executablePath: chromium, args: ["--no-sandbox", "--disable-gpu"]});
try {
  const page = await browser.newPage();
  page.on("request", request => { if (!/^(data|about):/.test(request.url()) && !request.url().startsWith(url)) result.requests.push(request.url()); });
  page.on("pageerror", error => result.errors.push(String(error)));
  page.on("console", message => { if (message.type() === "error") result.errors.push(message.text()); });
  await measure(page);
  for (const [size, viewport] of Object.entries(SIZES)) {
    await page.setViewport(viewport);
    for (const scheme of ["light", "dark"]) {
      await page.emulateMediaFeatures([{name: "prefers-color-scheme", value: scheme}]);
      await open(page);
      await picture(page, `status-${size}-${scheme}`);
      await check(page, `status-${size}-${scheme}`);
    }
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify(result));
