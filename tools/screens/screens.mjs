// Opens the status page in Chromium at the sizes of a desk and of a phone, dark and light; saves
// pictures, checks them by axe, and notes what the page asked for and what it cost.
//
//     node screens.mjs CHROMIUM URL FOLDER SECONDS
//
// Prints one JSON object: "violations" by picture, "requests" to other addresses, "errors" of the
// page, and "busy_percent", the share of a core that the page took while it was open.
import {createRequire} from "node:module";
import {readFileSync} from "node:fs";
import puppeteer from "puppeteer-core";

const [chromium, url, folder, seconds] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const SIZES = {desktop: {width: 1280, height: 900}, phone: {width: 390, height: 844, deviceScaleFactor: 2, isMobile: true, hasTouch: true}};

const browser = await puppeteer.launch({executablePath: chromium, args: ["--no-sandbox", "--disable-gpu"]});
const result = {violations: {}, requests: [], errors: [], busy_percent: null};
try {
  const page = await browser.newPage();
  page.on("request", request => { if (!request.url().startsWith(url) && !request.url().startsWith("data:")) result.requests.push(request.url()); });
  page.on("pageerror", error => result.errors.push(String(error)));
  page.on("console", message => { if (message.type() === "error") result.errors.push(message.text()); });
  await page.goto(url, {waitUntil: "networkidle0"});
  await page.waitForSelector("#queries h2");
  const before = await page.metrics();
  await new Promise(resolve => setTimeout(resolve, 1000 * seconds));
  const after = await page.metrics();
  result.busy_percent = 100 * (after.TaskDuration - before.TaskDuration) / (after.Timestamp - before.Timestamp);
  for (const [size, viewport] of Object.entries(SIZES)) {
    await page.setViewport(viewport);
    for (const scheme of ["light", "dark"]) {
      await page.emulateMediaFeatures([{name: "prefers-color-scheme", value: scheme}]);
      const name = `status-${size}-${scheme}`;
      await page.screenshot({path: `${folder}/${name}.png`, fullPage: true});
      const isWide = await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth");
      if (isWide) result.errors.push(`${name}: the page is wider than the screen`);
      // The page's own policy lets no other script run; the debugger may.
      await page.evaluate(axe);
      const {violations} = await page.evaluate("axe.run()");
      result.violations[name] = violations.map(violation => `${violation.impact}: ${violation.id}: ${violation.nodes[0].html.slice(0, 200)}`);
    }
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify(result));
