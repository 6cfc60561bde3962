"""Texts to edit or to quote, written for this benchmark: 150 to 400 tokens each. Joined they make the long prompts."""

INVENTORY_PY = '''\
class Inventory:
    """Items on the shelves of one shop, by article number."""

    def __init__(self, shop):
        self.shop = shop
        self.items = {}
        self.reserved = {}

    def add(self, article, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[article] = self.items.get(article, 0) + count

    def reserve(self, article, count, customer):
        free = self.items.get(article, 0) - self.total_reserved(article)
        if count > free:
            raise ValueError(f"only {free} of {article} are free")
        self.reserved.setdefault(article, []).append((customer, count))

    def total_reserved(self, article):
        return sum(count for _, count in self.reserved.get(article, []))

    def release(self, article, customer):
        kept = [entry for entry in self.reserved.get(article, []) if entry[0] != customer]
        self.reserved[article] = kept

    def report(self):
        for article, count in sorted(self.items.items()):
            print(article, count, self.total_reserved(article))
'''

SERVICE_YAML = """\
name: orders
image: registry.example.org/shop/orders:1.14.2
replicas: 3
port: 8080
environment:
  DATABASE_URL: postgres://orders@db.internal:5432/orders
  CACHE_URL: redis://cache.internal:6379/2
  LOG_LEVEL: info
  REQUEST_TIMEOUT_SECONDS: "20"
  MAX_ITEMS_PER_ORDER: "150"
resources:
  requests:
    cpu: 250m
    memory: 256Mi
  limits:
    cpu: "1"
    memory: 512Mi
health:
  path: /healthz
  interval_seconds: 10
  failures_before_restart: 3
volumes:
  - name: invoices
    mount: /var/lib/orders/invoices
    size: 20Gi
  - name: tmp
    mount: /tmp
    size: 1Gi
"""

LETTER = """\
Dear Mrs Okafor,

Thank you for visiting our workshop last Tuesday and for bringing the grandfather clock of your late uncle. I have now
taken the movement apart, and I can tell you what it needs.

The mainspring is sound, and so are most of the wheels. Two of the pivots are worn, which explains why the clock stopped
after some hours, and the leather of the hammer has hardened, so that the strike sounded like a tin cup. The case has no
woodworm, though the glass of the door is not the first one. I would leave it as it is, for it is old in its own right.

The repair will take about three weeks and cost 420 pounds, of which 90 are for new parts. I ask for no payment in
advance. If you agree, please let me know by Friday, and I shall begin on Monday. You are welcome to come and see the
work at any time during our opening hours.

With kind regards,
Edmund Thistlewood
"""

SCHEMA_SQL = """\
CREATE TABLE member (
    id          INTEGER PRIMARY KEY,
    full_name   TEXT NOT NULL,
    email       TEXT NOT NULL UNIQUE,
    joined_on   DATE NOT NULL DEFAULT CURRENT_DATE,
    is_active   BOOLEAN NOT NULL DEFAULT TRUE
);

CREATE TABLE book (
    id          INTEGER PRIMARY KEY,
    title       TEXT NOT NULL,
    author      TEXT NOT NULL,
    published   INTEGER,
    shelf       TEXT NOT NULL
);

CREATE TABLE loan (
    id          INTEGER PRIMARY KEY,
    member_id   INTEGER NOT NULL REFERENCES member (id),
    book_id     INTEGER NOT NULL REFERENCES book (id),
    lent_on     DATE NOT NULL DEFAULT CURRENT_DATE,
    due_on      DATE NOT NULL,
    returned_on DATE
);

CREATE INDEX loan_by_member ON loan (member_id, due_on);
CREATE INDEX loan_by_book ON loan (book_id) WHERE returned_on IS NULL;
"""

MINUTES = """\
Minutes of the allotment society, 14 March

Present: Ana, Bertram, Chidi, Dolores, Emil, Farida. Apologies: Gustav.

1. Water. The pump by the east gate has been repaired. Chidi will turn on the water on 1 April, if there is no frost in
the forecast. Nobody is to leave a hose running while they are away.
2. Compost. The municipality brings two loads on 28 March. Each plot may take up to six barrows. What is left after a
week goes to the common flower beds.
3. Bees. Farida would like to keep two hives behind the shed. There were no objections, but Emil asked for a sign on the
path. Farida will bring one.
4. Summer feast. Proposed for 21 June. Dolores looks after the food, Bertram after music, and Ana asks the neighbours
whether they mind. The budget is 300 euros.
5. Money. The balance is 1,842 euros. The fee remains at 45 euros a year and is due by the end of April.

The next meeting is on 11 April at seven in the evening, in the shed.
"""

CART_JS = """\
export function cartTotal(cart, rates) {
  let total = 0;
  for (const line of cart.lines) {
    const price = line.unitPrice * line.quantity;
    const discount = line.coupon ? price * line.coupon.percent / 100 : 0;
    total += price - discount;
  }
  const shipping = total > 50 ? 0 : 4.9;
  const tax = (total + shipping) * rates[cart.country];
  return round(total + shipping + tax);
}

export function addLine(cart, product, quantity) {
  const existing = cart.lines.find((line) => line.productId === product.id);
  if (existing) {
    existing.quantity += quantity;
    return cart;
  }
  cart.lines.push({
    productId: product.id,
    name: product.name,
    unitPrice: product.price,
    quantity,
    coupon: null,
  });
  return cart;
}

function round(amount) {
  return Math.round(amount * 100) / 100;
}
"""

LIGHTHOUSE = """\
The lighthouse of Cabo Ruivo was lit for the first time in the autumn of 1868. Its tower is built of granite
that was cut on the mainland and carried over by barge, and it took the masons four summers, because in winter
no boat could land. The keeper and his family lived in two rooms at its foot. They kept goats, a vegetable
garden behind a wall against the salt, and a barrel of rain water for each month of the year.

The lamp burned rape oil at first, then paraffin, and from 1931 electricity, which came through a cable on the
sea bed. The lens is still the original one: a cage of glass as tall as a man, turning in a bath of mercury so
smoothly that a child can move it with one finger. On a clear night its two flashes, followed by five seconds of
darkness, are seen from twenty-six miles away.

The last keeper, Amélia Duarte, left in 1987, when the light was made automatic. She had climbed its 163 steps
four times a day for thirty-one years. Asked what she missed, she answered: not the steps, but the silence at
the top of them.
"""

README_MD = """\
# tidewatch

Small command line program that tells when to go for a walk on the beach.

## Install

    pip install tidewatch

You need Python 3.10 or newer. There are no other dependencies.

## Use

    tidewatch today --harbour penzance
    tidewatch week --harbour brest --units metres

The first command prints high and low water of today; the second one the same for the next seven days. Times are local.
Add `--json` to get something for your own scripts.

## Where the numbers come from

Tides are computed on your machine from harmonic constants that ship with the package. They are good to about ten
minutes and twenty centimetres in ordinary weather. Do not use them for navigation.

## Contributing

Harbours are missing, above all in the southern hemisphere. Open an issue with a link to the constants, or send a pull
request that adds a file to `harbours/`. Please run `make check` first.
"""

RECIPE = """\
Potato soup for six people

Ingredients: 1.2 kg floury potatoes, 2 onions, 1 leek, 2 carrots, 80 g celeriac, 40 g butter, 1.5 litres stock,
1 bay leaf, 1 teaspoon marjoram, 150 ml cream, salt, pepper, nutmeg, and a bunch of chives.

1. Peel the potatoes and cut them into cubes. Chop the onions, slice the leek, and dice the carrots and the celeriac.
2. Melt the butter in a large pot. Soften the onions and the leek in it for five minutes without letting them brown.
3. Add the potatoes, the carrots, the celeriac and the bay leaf. Pour in the stock, bring it to the boil, and simmer for
twenty-five minutes with the lid half on.
4. Take out the bay leaf. Crush about half of the potatoes against the side of the pot with a spoon, so that the soup
becomes thick but keeps some pieces.
5. Stir in the marjoram and the cream. Season with salt, pepper and a little nutmeg, and let it rest for ten minutes.
6. Cut the chives finely and scatter them over the bowls. Rye bread goes well with it, and so do fried sausages.
"""

GLACIER = """\
A glacier is a river that forgot how to hurry. Snow falls on the high ground of its basin, year upon year, and
what does not melt in summer is pressed by the next winter's load until the flakes lose their arms, the grains
grow together, and the air between them is shut into bubbles. Some tens of metres down it is no longer snow but
ice, blue because it swallows the red part of the light.

Ice of that thickness flows. It creeps under its own weight, as honey would if honey took a century to leave the
spoon, and where its bed is wet it also slides. The middle moves faster than the margins, and the surface faster
than the bottom; a row of stakes set straight across in spring is a bow by autumn. Where the valley steepens,
the ice cannot follow and breaks into crevasses; where it flattens, they close again and leave only a ripple.

Lower down, more melts each summer than falls each winter, and somewhere along the way the two are equal.
Glaciologists call that height the equilibrium line. If it climbs for some years, the tongue below starves and
draws back, though the ice has not turned round: it goes on flowing downhill and is merely eaten sooner. What it
carried, it drops, and so the valleys of the north are full of walls of rubble that nobody built.

People who live beneath glaciers have always read them. A farmer in the Valais knew from the colour of the
stream what the weather had been on the summit; the monks of the hospice kept a book with the distance from a
painted rock to the ice, one line for every September since 1720. Those lines are short. Put one under the
other, they tell a long story.
"""

ALL = (GLACIER, INVENTORY_PY, LETTER, SERVICE_YAML, MINUTES, CART_JS, LIGHTHOUSE, SCHEMA_SQL, RECIPE, README_MD)
