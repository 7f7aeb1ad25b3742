"""What free-wording problems say: kinds of stories with their formulas, as grammars of `wording`.

Slots: {N} {F} {G} people, {p} {s} {h} the pronouns of {N}, {o} {u} things, {i} one of {o}, {c} {cc} a
container and its plural, {a} {b} {d} {e} the numbers. A formula names them too: `a*b; _-d` multiplies,
then takes d from the result; `_1` is the first result.
"""

from dataclasses import dataclass

THINGS = [
    "apple",
    "book",
    "coin",
    "card",
    "pen",
    "stamp",
    "shell",
    "egg",
    "cup",
    "ball",
    "toy",
    "cake",
    "marble",
    "sticker",
    "pencil",
    "cookie",
    "candy",
    "orange",
    "banana",
    "balloon",
    "photo",
    "brick",
    "bead",
    "button",
    "rose",
    "tulip",
    "plant",
    "chair",
    "plate",
    "bottle",
    "ticket",
    "magazine",
    "comic",
    "stone",
    "feather",
    "poster",
    "notebook",
    "muffin",
    "sandwich",
    "pear",
    "lemon",
    "carrot",
    "potato",
    "onion",
    "pumpkin",
    "nail",
    "screw",
    "candle",
    "lamp",
    "shirt",
    "sock",
    "hat",
    "towel",
    "badge",
    "postcard",
    "crayon",
    "brush",
    "doughnut",
    "pancake",
    "pie",
    "cupcake",
    "biscuit",
    "sweet",
    "chocolate",
    "peach",
    "plum",
    "melon",
    "tomato",
    "seed",
    "tree",
    "duck",
    "hen",
    "rabbit",
    "goat",
    "sheep dog",
    "fish tank",
    "kite",
    "puzzle",
    "robot",
    "game",
    "key",
    "ribbon",
    "cushion",
    "blanket",
    "mug",
    "glass",
    "spoon",
    "fork",
    "letter",
    "envelope",
    "parcel",
    "box",
    "toy car",
    "tennis ball",
    "light bulb",
    "roll",
    "leaflet",
    "sheet",
    "sausage",
    "burger",
    "pizza",
]
GOODS = [
    "shirt",
    "book",
    "pen",
    "notebook",
    "ticket",
    "cake",
    "mug",
    "hat",
    "lamp",
    "chair",
    "towel",
    "toy",
    "game",
    "sandwich",
    "burger",
    "pizza",
    "coffee",
    "juice",
    "bottle",
    "plant",
    "rose",
    "magazine",
    "candle",
    "pie",
    "melon",
    "muffin",
    "brush",
    "bag",
    "ball",
    "kite",
    "poster",
    "puzzle",
    "sock",
    "scarf",
    "card",
    "cup",
    "box",
    "meal",
    "lesson",
    "ride",
    "loaf tin",
    "pineapple",
]
CONTAINERS = [
    "box",
    "bag",
    "basket",
    "jar",
    "crate",
    "tray",
    "shelf unit",
    "drawer",
    "packet",
    "carton",
    "bucket",
    "row",
    "pack",
    "table",
    "bunch",
    "stack",
    "case",
    "page",
    "room",
    "team",
    "van",
    "pile",
    "group",
]
MEMBERS = [
    "student",
    "child friend",
    "guest",
    "passenger",
    "player",
    "visitor",
    "member",
    "worker",
    "tourist",
    "bird",
    "cow",
    "cat",
    "dog",
    "car",
    "bike",
    "horse",
    "boat",
    "frog",
    "pupil",
    "fan",
    "singer",
    "dancer",
    "soldier",
    "bee",
]

MEN = (
    "Tom, Ben, Sam, Leo, Max, Omar, Ravi, Paul, Jack, Peter, David, Carlos, Ahmed, Kenji, Noah, Liam, "
    "Oscar, Victor, Hugo, Felix, Ivan, Mr. Brown, Mr. Lee, Mr. Costa, Uncle Joe, Grandpa, Dad, "
    "my brother, the farmer, the baker, his friend, the teacher, Luis, Viktor, Daniel, Ali, George"
)
WOMEN = (
    "Anna, Mia, Lucy, Nina, Sara, Emma, Ling, Rosa, Maria, Julia, Fatima, Priya, Yuki, Olivia, Sofia, "
    "Zoe, Ella, Clara, Hannah, Ivy, Mrs. Green, Mrs. Patel, Ms. Novak, Aunt May, Grandma, Mum, Mom, "
    "my sister, the gardener, the librarian, the nurse, the coach, Aisha, Elena, Kate, Amy, Grace"
)


@dataclass(frozen=True)
class Kind:
    """One kind of story: sentences, the question, the formula, and how large each number may be
    (s 2 to 12, m 2 to 60, l 10 to 150, one letter for each of a, b, d, e).
    """

    name: str
    story: tuple[str, ...]
    question: str
    formula: str
    sizes: str


_HAS = "[~has|had|~owns|~keeps|~collected|has got]"
HOLD = (
    "[{N} had {a} {o}|{N} ~has {a} {o}|{N} [bought|picked|found|collected|received|made|was given] {a} {o}|"
    "{N} ~starts [the day|the week|the game|out] with {a} {o}|There are {a} {o} in {N}'s [room|bag|garden|kitchen|shop]|"
    "{N} [~owns|owned|~keeps|kept|packed|brought] {a} {o}|In the [morning|beginning|kitchen], {N} had {a} {o}|"
    "{N} has [a collection|a stock|a pile] of {a} {o}]"
)
GET = (
    "[[then|later|after that|the next day|] {p} [bought|found|got|~buys|~finds|~gets|received|picked up|collected|made|~makes|won|earned|took] {b} [more|other|new|extra|more {o}|additional {o}]|"
    "{F} [gave|gives|handed|brought|sent|passed] {h} {b} [more|more {o}|{o}|of hers|extra {o}]|"
    "{p} [got|received|was given] {b} [more|more {o}|{o}] [from {F}|for {s} birthday|as a present|at the market|on Monday]|"
    "another {b} [{o}|] [came|were added|arrived|turned up] [later|the day after|in the afternoon|on Tuesday|]]"
)
LOSE = (
    "[[then|later|after that|the next day|] {p} [gave|~gives] {b} [of them|{o}|] [to {F}|away|to a friend|to charity|to the neighbours]|"
    "[then|later|] {p} [lost|~loses|sold|~sells|used|~uses|dropped|ate|broke|threw out|donated|spent|handed out] {b} [of them|{o}|of the {o}]|"
    "{b} [of them|of the {o}|{o}] [broke|were broken|got lost|were stolen|went missing|were sold|fell out|were used up|were thrown away|were eaten|had gone bad]|"
    "{F} [took|takes|borrowed|borrows|bought|stole|needed|ate] {b} of [them|the {o}|{s} {o}]]"
)
LEFT = (
    "[How many [{o}|of them|] [are|were] [left|still there|left over|left in the end]?|How many {o} [~does|did] {p} [still have|have left|have now|have then|keep|end up with]?|"
    "What is [the number of {o} left|left of the {o}]?|How many {o} remain?|How many {o} [~does|did] {N} have [left|now|in the end|after that]?]"
)
NOW = (
    "[How many {o} [~does|did] {p} have [now|in total|altogether|in all|in the end|then]?|How many {o} are there [now|in total|altogether|in all]?|"
    "What is the [total|new] number of {o}?|How many {o} [~does|did] {N} have [now|in total|altogether|in all]?|How many {o} is that [in total|altogether|in all]?]"
)
EACH = "[There are|{N} ~has|{N} ~fills|{N} packed|{N} bought|We have|{N} put out] {a} {cc}[, each with {b} {o}| with {b} {o} each| with {b} {o} in each| of {b} {o} each|. Each {c} [holds|has|contains] {b} {o}|. There are {b} {o} in [each|every] {c}| and puts {b} {o} in each]"
BUY = (
    "[{N} [buys|bought|ordered|needs|~wants to buy|~picks out] {a} {o}[ at ${b} each| for ${b} each|. Each {i} [costs|is|sells for] ${b}|, and each one costs ${b}|. They cost ${b} apiece| that cost ${b} each| that are ${b} each]|"
    "[A|One] {i} costs ${b}[. {N} [buys|bought|takes|needs|orders] {a} [of them|{o}|]|, and {N} [buys|bought|takes|wants] {a} of them]|"
    "[{o} cost|The price of {o} is] ${b} [each|per piece|apiece]. {N} [buys|bought|takes|needs] {a} [of them|]]"
)
COST = "[How much [~does|did] {p} [pay|spend] [in total|in all|altogether|]?|What is the [total|full] [cost|price|bill]?|How [many dollars|much money] is that [in all|in total|]?|How much [do|did] [they|the {o}] cost [together|in total|]?|How much [is the bill|must {N} pay]?]"
PEOPLE = (
    "[There [are|were] {a} {o} [on the bus|in the park|at the party|in the hall|on the field|in the club|on the lake|in the yard|on the train|in the room|at the station|in the zoo|on the farm]|"
    "[A bus|A train|A ferry|A club|The hall|The park|A school] [has|had|starts with|started with] {a} {o}|{a} {o} [are|were] [waiting|sitting|playing|resting|standing] [there|outside|in the shade|by the gate|in a row]]"
)
COME = "[{b} [more|more {o}|others|other {o}] [come|came|arrive|arrived|get on|got on|join|joined|enter|entered|turned up]|[then|later|at the next stop|after lunch|], {b} [more|more {o}] [come|came|arrived|joined|got on]|another {b} [{o}|] [join|joined|arrived|came in] [later|]]"
GO = "[{b} [of them|{o}|of the {o}] [leave|left|go home|went home|go away|went away|get off|got off|drop out|walked off|went away]|[then|later|at the next stop|after an hour|], {b} [of them|{o}|] [left|go|went home|leave|got off]]"
THERE = "[How many {o} are [there|there now|there in the end|still there]?|How many are [there now|there in the end|left]?|What is the number of {o} now?|How many {o} [does that make|is that]?]"
PER_DAY = "[{N} [~reads|~writes|~bakes|~makes|~sells|~packs|~washes|~paints|~earns|~runs|~delivers|~plants|~collects|~solves|~drinks] {b} {o} [a day|every day|each day|per day|an hour|every hour|per hour|each morning|a week|each week]]"

KINDS = (
    Kind("gain", (HOLD, GET), NOW, "a+b", "mm"),
    Kind("loss", (HOLD, LOSE), LEFT, "a-b", "mm"),
    Kind("come", (PEOPLE, COME), THERE, "a+b", "mm"),
    Kind("go", (PEOPLE, GO), THERE, "a-b", "lm"),
    Kind(
        "both",
        (
            "[{N} ~has {a} {o}[, and| and] {F} has {b}|{N} [found|picked|made|sold|baked|bought|caught|drew|wrote] {a} {o}[, and| and|;] {F} [{b}|{b} {o}]|There are {a} [red|big|green|old|full|fresh|white] {o} and {b} [blue|small|yellow|new|empty|black|broken] [ones|{o}]|{N} [bought|made|sold|counted|saw|planted] {a} {o} [on Monday|in the morning|last week|on Saturday|yesterday] and {b} [more|] [on Tuesday|in the afternoon|this week|on Sunday|today]]",
        ),
        "[How many {o} [is that|are there|are that] [in total|together|altogether|in all]?|How many {o} [do they have|are there] [together|in all|altogether]?|What is the total [number of {o}|]?|How many is that [altogether|in total|in all]?|How many {o} in total?]",
        "a+b",
        "mm",
    ),
    Kind(
        "more than",
        (
            "[{N} ~has|{N} ~owns|{N} [sold|found|made|read|picked|caught|collected]] {a} {o}",
            "[{F} [has|owns|got|made|found] {b} more [{o}|] than [{N}|{h}|that]|{F} has {b} more|{F} has the same number plus {b} more]",
        ),
        "[How many [{o} |]does {F} have?|How many {o} [are {F}'s|has {F} got]?|What is {F}'s number [of {o}|]?]",
        "a+b",
        "mm",
    ),
    Kind(
        "fewer than",
        (
            "[{N} ~has|{N} ~owns|{N} [sold|found|made|read|picked|caught|collected]] {a} {o}",
            "[{F} [has|owns|got|made|found] {b} [fewer|less] [{o}|] than [{N}|{h}|that]|{F} has {b} [fewer|less]|That is {b} more than {F} has]",
        ),
        "[How many [{o} |]does {F} have?|How many {o} [are {F}'s|has {F} got]?|What is {F}'s number [of {o}|]?]",
        "a-b",
        "mm",
    ),
    Kind(
        "difference",
        (
            "[{N} ~has {a} {o}[, and| and| while| but] {F} [only has|has] {b}|{N} [sold|made|scored|read|picked] {a} {o}, {F} [only|] {b}|There are {a} {o} and [only|] {b} {u}|{N} ~needs {a} {o}[. So far {p} ~has {b}| but only ~has {b}| and already ~has {b}]|{N} [saw|counted|planted|bought] {a} {o} and {b} {u}]",
        ),
        "[How many more [{o}|] is that?|How big is the difference?|What is the difference?|How many are missing?|How many more of [the former|the first] are there?|How many more [{o}|] are [there|needed]?|By how many do they differ?|How many more does [the first|{N}] have?]",
        "a-b",
        "mm",
    ),
    Kind(
        "missing",
        (
            "[{N} [~wants|~needs|would like|~plans] to [buy|collect|have|make|get] {a} {o}|[The shelf|The album|The hall|The box|The bus] [holds|has room for|takes|needs] {a} {o}|A {i} costs ${a}|{N} is saving for a {u} that costs ${a}|The book of {N} has {a} pages]",
            "[{p} already ~has {b}|so far {p} ~has {b}|{b} are [already there|there already|done]|{p} [~has|saved|read|finished] {b} so far|only {b} are there now]",
        ),
        "[How many [more|] [~does {p} need|are still needed|are missing|are left to go]?|How much is [still|] missing?|How [many|much] more [~does {p} need|is needed]?|What is still missing?]",
        "a-b",
        "lm",
    ),
    Kind(
        "times",
        (
            "[{N} ~has|{N} [found|sold|made|read|picked|baked]] {b} {o}",
            "[{F} has [{a} times as many|{a} times that number|{a} times as many {o}|{a} times more]|{F} [found|sold|made|has|got] {a} times as many [as {N}|]]",
        ),
        "[How many [{o} |]does {F} have?|How many {o} [are {F}'s|is that]?|What is {F}'s number [of {o}|]?]",
        "a*b",
        "sm",
    ),
    Kind("groups", (EACH,), NOW, "a*b", "sm"),
    Kind(
        "rows",
        (
            "[{N} [plants|sets up|arranges|lays out] {a} rows of {b} {o}|In the [hall|garden|box|theatre] there are {a} rows [of|with] {b} {o} [each|]|{a} [friends|children|workers|players|students] [each have|have|each bring|each get|each make|each carry] {b} {o} [each|]|A [garden|hall|farm] has {a} [rows|lines], and each [row|line] has {b} {o}]",
        ),
        NOW,
        "a*b",
        "sm",
    ),
    Kind(
        "rate",
        (
            PER_DAY,
            "[{p} ~does [so|this|that] for {a} [days|hours|weeks]|{p} ~goes on for {a} [days|hours]|{a} [days|hours] [pass|go by]|{p} [keeps|kept] this up for {a} [days|hours|weeks]]",
        ),
        "[How many {o} is that [in all|in total|altogether|]?|How many {o} [are there|are that] in the end?|How many [{o}|] in {a} [days|hours|weeks]?|What does that come to?]",
        "a*b",
        "sm",
    ),
    Kind(
        "share",
        (
            "[{N} ~has {a} {o}|There are {a} {o}|{N} [baked|bought|picked|brought|made] {a} {o}|{a} {o} are [on the table|there|ready]]",
            "[{p} [~shares|shared|~splits|divided|~divides] them [equally|evenly|fairly] [among|between] {b} [friends|children|people|students|{cc}]|{b} [friends|children|people|workers|neighbours] share them [equally|evenly]|they are [packed|put|sorted] [evenly|equally] into {b} {cc}|{p} [~puts|put] the same number in each of {b} {cc}]",
        ),
        "[How many {o} [does each [get|one get|have]|are in each|go in each]?|How many [are there|are] [in each|for each]?|What does each [one |]get?|How many [{o} |]per [person|{c}] is that?|How many {o} will there be in each?]",
        "a/b",
        "ls",
    ),
    Kind(
        "packs",
        (
            "[{N} ~has {a} {o}|There are {a} {o}|{N} [baked|bought|picked|made] {a} {o}|A [shop|factory|farm] has {a} {o}]",
            "[{b} [{o} |][fit|go] in [a|one|each] {c}|[each|a|one] {c} [holds|takes|has room for] {b} [{o}|of them|]|{p} [~puts|puts|~packs] {b} [{o}|of them|] [in|into] each {c}|they are packed in {cc} of {b}]",
        ),
        "[How many {cc} [~does {p} need|are needed|are there|can be filled|does that make|are full]?|What is the number of {cc}?|How many {cc} is that?]",
        "a/b",
        "ls",
    ),
    Kind("price", (BUY,), COST, "a*b", "sm"),
    Kind(
        "unit price",
        (
            "[{N} [paid|pays|spent] ${a} for {b} {o}|{b} {o} [cost|are] ${a} [in total|together|]|{N} [earned|got|earns|made] ${a} [for|in] {b} [hours|days|jobs]|{N} bought {b} {o} [for|and paid] ${a} [altogether|in all|]]",
        ),
        "[How much [is|does|was] [one|each|a single one] [cost|]?|What does [one|each|a single] {i} cost?|What is the price of [one|each|a {i}]?|How much is that [for one|per piece|each|a piece]?|How much for each?]",
        "a/b",
        "ls",
    ),
    Kind(
        "how many for",
        (
            "[{N} ~has ${a}|{N} [spent|paid|~spends|saved|got] ${a}|There are ${a} in the [box|purse|till]]",
            "[[each|one|a] {i} [costs|is|was|sells for] ${b}|{o} [are|cost|were] ${b} [each|apiece]]",
        ),
        "[How many {o} [can|could] {p} buy?|How many [{o} |]can be bought [for that|with it]?|How many [{o} |][is|was] that?|For how many {o} is that enough?]",
        "a/b",
        "ls",
    ),
    Kind(
        "change",
        (
            "[{N} [buys|bought|takes|~wants] a {i} for ${b}|A {i} costs ${b}|The bill [of {N} |]is ${b}|{N} [spent|~spends] ${b} [on a {i}|at the market|on food]]",
            "[{p} [paid|pays|~pays] with [a ${a} note|${a}|a ${a} bill]|{p} [~has|had|gave|brought|gives the cashier|~hands over] ${a}]",
        ),
        "[How much [change|money] [~does {p} get|is that|~does {p} get back]?|How much [money |]is left?|What is the change?|How much [~does|did] {p} have left?|How many dollars [are left|~does {p} get back]?]",
        "a-b",
        "lm",
    ),
    Kind(
        "save",
        (
            "[{N} ~has ${a}|{N} [saved|had] ${a}|There is ${a} in {N}'s [purse|money box|account]]",
            "[{p} [earns|~earns|earned|got|~gets|found|~saves|saved] [another |]${b} [more|by washing cars|for helping|from {F}|on Friday]|{F} [gives|gave] {h} ${b} [more|]]",
        ),
        "[How much [money |][~does {p} have|is that|~does {p} have now] [in all|in total|]?|What is the [sum|total]?|How many dollars is that?|How much money does that make?]",
        "a+b",
        "mm",
    ),
    Kind(
        "spend",
        (
            "[{N} ~has ${a}|{N} [saved|had|earned|got] ${a}|There is ${a} in {N}'s [purse|money box|account]]",
            "[{p} [~spends|spent|~pays|paid|uses] ${b} [on {o}|for a {i}|on lunch|on a bus ticket|at the shop|for a book]|{p} [lost|~loses|gave {F}|lends {F}|donated] ${b}|a {i} for ${b} [was bought|is paid with it]]",
        ),
        "[How much [money |][is left|~does {p} have left|remains|~does {p} still have|~does {p} have now]?|What is left?|How many dollars are left?]",
        "a-b",
        "mm",
    ),
    Kind(
        "older",
        (
            "[{N} is {a} [years old|]|{N}'s age is {a}|{N} turned {a} [this year|last week|]]",
            "[{F} is {b} years older [than {N}|than {h}|]|[{N}'s|the] [cousin|neighbour] {F} is {b} years older|{F} was born {b} years earlier]",
        ),
        "[How old is {F}?|What is {F}'s age?|How old is {F} now?|What age is {F}?]",
        "a+b",
        "mm",
    ),
    Kind(
        "younger",
        (
            "[{N} is {a} [years old|]|{N}'s age is {a}|{N} turned {a} [this year|last week|]]",
            "[{F} is {b} years younger [than {N}|than {h}|]|[{N}'s|the] [cousin|neighbour] {F} is {b} years younger|{F} was born {b} years later]",
        ),
        "[How old is {F}?|What is {F}'s age?|How old is {F} now?|What age is {F}?]",
        "a-b",
        "mm",
    ),
    Kind(
        "later",
        (
            "[{N} is {a} [years old|] [now|today|]|{N} [turns|turned|becomes] {a} [today|this year]]",
        ),
        "[How old will {p} be [in {b} years|{b} years from now|after {b} years]?|What will {s} age be in {b} years?|In {b} years, how old [will {p} be|will {N} be]?]",
        "a+b",
        "mm",
    ),
    Kind(
        "ago",
        (
            "[{N} is {a} [years old|] [now|today|]|{N} [turns|turned|becomes] {a} [today|this year]]",
        ),
        "[How old was {p} {b} years ago?|What was {s} age {b} years ago?|{b} years ago, how old was [{p}|{N}]?]",
        "a-b",
        "mm",
    ),
    Kind(
        "had before loss",
        (
            "[{N} had [some|a number of|a few] {o}|There were some {o} in the box|{N} [baked|bought|picked|made] some {o}]",
            "[{p} [gave|sold|lost|used|ate|threw away] {b} of them|{b} of them were [sold|lost|eaten|given away]|{F} took {b} of them]",
            "[now {p} ~has {a} left|now {a} are left|{a} {o} are left|there are still {a} {o}|{a} remain]",
        ),
        "[How many [{o} |][did {p} have|were there] [at first|at the start|in the beginning|before|to begin with]?|How many [{o} |]were there [before|at first|originally]?|With how many {o} did {p} start?]",
        "a+b",
        "mm",
    ),
    Kind(
        "had before gain",
        (
            "[{N} had [some|a number of|a few] {o}|There were some {o} in the box|{N} [owned|kept] some {o}]",
            "[{p} [bought|found|got|made|received] {b} more|{F} gave {h} {b} more|{b} more were added]",
            "[now {p} ~has {a}|now there are {a}|after that there are {a} {o}|that makes {a} [in all|altogether]|then {p} had {a} {o}]",
        ),
        "[How many [{o} |][did {p} have|were there] [at first|at the start|in the beginning|before|to begin with]?|How many [{o} |]were there [before|at first|originally]?|With how many {o} did {p} start?]",
        "a-b",
        "lm",
    ),
    Kind(
        "how many gone",
        (
            "[{N} had {a} {o}|There were {a} {o} [on the table|in the box|at first]|{N} [bought|baked|picked] {a} {o}]",
            "[now [only |]{b} [are left|remain|are there]|after [lunch|a day|the party] [only |]{b} [were|are] left|{p} now only ~has {b}|{F} took some, and {b} are left]",
        ),
        "[How many [{o} |][are gone|were taken|were lost|have gone|disappeared|are missing]?|How many did [{F} take|{p} lose|{p} give away|{p} sell|{p} eat]?|How many {o} went?]",
        "a-b",
        "mm",
    ),
    Kind(
        "part and whole",
        (
            "[There are {a} {o} [in the box|in the class|in all|altogether]|{N} ~has {a} {o}|A [class|club|shop|garden] has {a} {o}|{a} {o} are [there|on display]]",
            "[{b} [of them |]are [red|boys|old|small|broken|new|ready|empty|sold|wooden]|{b} of [the {o}|these] are [red|big|old|green|damaged|full]]",
        ),
        "[How many [{o} |]are [not|the others|of another kind]?|How many [{o} |]are not [like that|so|that]?|How many [others|other {o}] are there?|How many are the rest?]",
        "a-b",
        "lm",
    ),
    Kind(
        "distance",
        (
            "[A car|A train|A bus|A cyclist|A boat|{N}] [drives|goes|travels|moves|covers] [at|] {b} [km|kilometres|miles] [an hour|per hour|each hour|in one hour] [for {a} hours|, and does so for {a} hours|. The trip takes {a} hours]",
        ),
        "[How far [is that|is the trip|does it go]?|What [distance|length] is [that|covered]?|How many [km|kilometres|miles] is that?|How long is the way?]",
        "a*b",
        "sm",
    ),
    Kind(
        "duration",
        (
            "[The [road|trip|race|track|way|path] is {a} [km|kilometres|miles|metres] long|It is {a} [km|miles|kilometres] to the [city|sea|lake|next town]|{N} [~has to|wants to] [walk|drive|ride] {a} [km|miles]]",
            "[{N} [drives|rides|goes|walks|runs] {b} [km|kilometres|miles|metres] [an hour|per hour|each hour|every minute|a day]|{s} speed is {b} [km|miles] per hour]",
        ),
        "[How long [does it take|does that take|is {p} on the way]?|How many [hours|days|minutes] [does that take|does it take|is that]?|In how many [hours|days] is {p} there?]",
        "a/b",
        "ls",
    ),
    Kind(
        "cut",
        (
            "[A [rope|ribbon|plank|pipe|string|cable|board] is {a} [cm|metres|feet|inches|m] long|{N} has {a} [metres|feet|m|cm] of [rope|ribbon|cloth|wire|string]|A [tank|barrel|jug|can|pool] [holds|has|contains] {a} [litres|gallons] [of water|of oil|]]",
            "[{p} [cuts off|uses|used|cut off|takes|~takes] {b} [of it|]|{b} [of it |][are cut off|are used|leak out|are poured out|run out|are taken away]|{F} needs {b} of it]",
        ),
        "[How [much|long] is [left|the rest]?|How much remains?|What is left?|How [many metres|many litres|much] [are left|is left over|is there still]?]",
        "a-b",
        "lm",
    ),
    Kind(
        "area",
        (
            "[A [garden|room|field|picture|carpet|wall|yard] is {a} [m|metres|feet|cm] [long|wide] and {b} [m|metres|feet|cm] [wide|high|long]|A rectangle [has sides of|is] {a} [by|and] {b} [cm|metres|]]",
        ),
        "[What is [its|the] area?|How big is [its|the] area?|How many square [metres|feet|units] is that?|How large is it?]",
        "a*b",
        "sm",
    ),
    Kind(
        "half",
        (
            HOLD,
            "[half [of them |]|one half ][are sold|were sold|is given away|break|were eaten|go to {F}|are gone]",
        ),
        LEFT,
        "a/2",
        "l",
    ),
    Kind(
        "twice",
        (
            "[{N} ~has {a} {o}|{N} [sold|made|found|picked|read] {a} {o}]",
            "[{F} [has|found|made|sold|got] [twice as many|double that number|twice that number|double the amount|twice as many {o}]]",
        ),
        "[How many [{o} |]does {F} have?|How many {o} [are {F}'s|is that]?|What is {F}'s number?]",
        "a*2",
        "m",
    ),
    Kind(
        "half as many",
        (
            "[{N} ~has {a} {o}|{N} [sold|made|found|picked|read] {a} {o}]",
            "[{F} [has|found|made|sold|got] [half as many|half that number|only half as many|half of that|half as many {o}]]",
        ),
        "[How many [{o} |]does {F} have?|How many {o} [are {F}'s|is that]?|What is {F}'s number?]",
        "a/2",
        "l",
    ),
    # Two steps.
    Kind("gain loss", (HOLD, GET, LOSE.replace("{b}", "{d}")), LEFT, "a+b; _-d", "mmm"),
    Kind("loss gain", (HOLD, LOSE, GET.replace("{b}", "{d}")), NOW, "a-b; _+d", "mmm"),
    Kind("loss loss", (HOLD, LOSE, LOSE.replace("{b}", "{d}")), LEFT, "a-b; _-d", "lmm"),
    Kind("gain gain", (HOLD, GET, GET.replace("{b}", "{d}")), NOW, "a+b; _+d", "mmm"),
    Kind("come go", (PEOPLE, COME, GO.replace("{b}", "{d}")), THERE, "a+b; _-d", "mmm"),
    Kind("go come", (PEOPLE, GO, COME.replace("{b}", "{d}")), THERE, "a-b; _+d", "mmm"),
    Kind("groups loss", (EACH, LOSE.replace("{b}", "{d}")), LEFT, "a*b; _-d", "smm"),
    Kind("groups gain", (EACH, GET.replace("{b}", "{d}")), NOW, "a*b; _+d", "smm"),
    Kind(
        "price change",
        (
            BUY,
            "[{p} [pays|~pays|paid] with [${d}|a ${d} note|a ${d} bill]|{p} [~has|had|~brings|gives the cashier] ${d}]",
        ),
        "[How much [change|money] [~does {p} get|~does {p} get back|is left]?|How much [money |]is left?|What is the change?|How much [~does|did] {p} have left [after that|]?|How many dollars are left?]",
        "a*b; d-_",
        "sml",
    ),
    Kind(
        "price plus",
        (
            BUY,
            "[{p} also [buys|~buys|bought|~takes] a {u} [for ${d}|that costs ${d}]|a {u} [for|at] ${d} [comes on top|is added]|[shipping|delivery|the bag|a drink] costs [another |]${d}]",
        ),
        COST,
        "a*b; _+d",
        "smm",
    ),
    Kind(
        "sum shared",
        (
            "[{N} ~has {a} {o} and {F} has {b}|{N} [picked|made|bought|found|baked] {a} {o} and {F} {b}|There are {a} red {o} and {b} green {o}]",
            "[they [share|split|divide] them [equally|evenly] [among|between] {d} [friends|children|people]|they [put|pack] them evenly into {d} {cc}|{d} [children|friends|guests] share them [equally|evenly]]",
        ),
        "[How many {o} [does each [get|one get]|are in each|are there for each]?|How many [does each get|are in each]?|What does each get?]",
        "a+b; _/d",
        "mms",
    ),
    Kind(
        "rest shared",
        (
            HOLD,
            LOSE,
            "[[the rest is|the others are|what is left is] [shared|divided|split] [equally|evenly] [among|between] {d} [friends|children|people]|{p} [~puts|put|~packs] the [rest|others] evenly [in|into] {d} {cc}|{d} [friends|children] share the rest [equally|evenly]]",
        ),
        "[How many {o} [does each [get|one get]|are in each]?|How many [does each get|are in each]?|What does each get?]",
        "a-b; _/d",
        "mms",
    ),
    Kind(
        "groups shared",
        (
            EACH,
            "[{p} [~shares|~splits|divided] them [equally|evenly] [among|between] {d} [friends|children|people]|{d} [friends|children|people] share them [equally|evenly]]",
        ),
        "[How many {o} does each [get|one get|child get]?|How many does each get?|What does each get?]",
        "a*b; _/d",
        "sms",
    ),
    Kind(
        "more together",
        (
            "[{N} ~has|{N} ~owns|{N} [sold|found|made|read|picked|caught|collected]] {a} {o}",
            "[{F} [has|owns|got|made|found] {b} more [{o}|] than [{N}|{h}]|{F} has {b} more]",
        ),
        "[How many [{o} |][do they have|are there|is that] [together|in all|altogether|in total]?|What is their total [number of {o}|]?|How many {o} do the two have [together|]?]",
        "a+b; a+_",
        "mm",
    ),
    Kind(
        "fewer together",
        (
            "[{N} ~has|{N} ~owns|{N} [sold|found|made|read|picked|caught|collected]] {a} {o}",
            "[{F} [has|owns|got|made|found] {b} [fewer|less] [{o}|] than [{N}|{h}]|{F} has {b} [fewer|less]]",
        ),
        "[How many [{o} |][do they have|are there|is that] [together|in all|altogether|in total]?|What is their total [number of {o}|]?|How many {o} do the two have [together|]?]",
        "a-b; a+_",
        "mm",
    ),
    Kind(
        "times together",
        (
            "[{N} ~has|{N} [found|sold|made|read|picked|baked]] {b} {o}",
            "[{F} has [{a} times as many|{a} times that number|{a} times as many {o}]|{F} [found|sold|made|got] {a} times as many [as {N}|]]",
        ),
        "[How many [{o} |][do they have|are there|is that] [together|in all|altogether|in total]?|What is their total [number of {o}|]?|How many {o} do the two have [together|]?]",
        "a*b; b+_",
        "ss",
    ),
    Kind(
        "rate loss",
        (
            PER_DAY,
            "[{p} ~does [so|this|that] for {a} [days|hours|weeks]|{p} [keeps|kept] this up for {a} [days|hours]]",
            "[[then|later|] {p} [gives away|~sells|sold|lost|~loses] {d} [of them|{o}]|{d} of them [break|are lost|are thrown away|go to {F}|were bad]]",
        ),
        LEFT,
        "a*b; _-d",
        "smm",
    ),
    Kind(
        "rate gain",
        (
            "[{N} ~has {d} {o}|{N} [~starts|began] with {d} {o}|At first there are {d} {o}]",
            PER_DAY.replace("{N}", "{p}").replace("{o}", "[{o}|more|more {o}|new {o}]"),
        ),
        "[How many {o} [are there|~does {p} have|is that] after {a} [days|hours|weeks]?|What is the number [of {o} |]after {a} [days|hours|weeks]?|After {a} [days|hours|weeks], how many {o} [are there|~does {p} have]?]",
        "a*b; d+_",
        "smm",
    ),
    Kind(
        "day and night",
        (
            "[{N} [~sells|~reads|~makes|~drinks|~eats|~uses|~walks|~runs|~does] {a} {o} [in the morning|before lunch|by day] and {b} [in the evening|after lunch|at night]] [every day|each day|a day]",
        ),
        "[How many {o} is that in {d} days?|In {d} days, how many [{o} |]is that?|How many {o} in {d} days?|What is the total after {d} days?]",
        "a+b; _*d",
        "sss",
    ),
    Kind(
        "left per day",
        (
            "[{N} is reading a book of {a} pages|A book has {a} pages|{N} ~has to [learn|write|read] {a} pages|{N} has {a} {o} to [pack|wash|paint|sort]]",
            "[{p} [read|finished|did|has done|~has done] {b} [already|on the first day|so far]|{b} are done]",
            "[{p} ~does {d} [a day|each day|per day|every day] from now on|from then on, {p} ~does {d} [a day|each day|every day]|{p} wants to [finish|do] {d} [a day|every day]]",
        ),
        "[How many days [does the rest take|~does {p} need|are needed|more does that take]?|In how many days is {p} done?|How many [more |]days [will it take|does it take]?]",
        "a-b; _/d",
        "lms",
    ),
    Kind(
        "around",
        (
            "[A [garden|room|field|picture|carpet|yard] is {a} [m|metres|feet|cm] [long|] and {b} [m|metres|feet|cm] wide|A rectangle [has sides of|is] {a} [by|and] {b} [cm|metres|]]",
        ),
        "[What is [its|the] perimeter?|How long is the fence around it?|How far is it [once |]around?|How long is [its|the] border?]",
        "a+b; _*2",
        "mm",
    ),
    Kind(
        "save up",
        (
            "[{N} ~wants to buy a {u} [for|that costs] ${a}|A {u} costs ${a}|{N} ~needs ${a} for a {u}]",
            "[{p} [already |]~has ${b}|{p} has saved ${b} so far]",
            "[{p} [~saves|~earns|~gets] ${d} [a week|each week|every week|a day|per month]|[each|every] [week|month] {p} [~gets|~saves|~earns] ${d}]",
        ),
        "[How many [weeks|months|days] [~does {p} need|does it take|must {p} wait]?|How long [does it take|must {p} save]?|After how many [weeks|months] ~does {p} have enough?]",
        "a-b; _/d",
        "lms",
    ),
    Kind(
        "half then",
        (
            HOLD,
            "[{p} [gives|gave|sold|~sells|ate|used] half of them|half of them are [sold|gone|given away|eaten]]",
            LOSE,
        ),
        LEFT,
        "a/2; _-b",
        "lm",
    ),
    Kind(
        "twice together",
        (
            "[{N} ~has {a} {o}|{N} [sold|made|found|picked|read] {a} {o}]",
            "[{F} [has|found|made|sold|got] [twice as many|double that number|twice that number|twice as many {o}]]",
        ),
        "[How many [{o} |][do they have|are there|is that] [together|in all|altogether|in total]?|What is their total?|How many {o} do the two have [together|]?]",
        "a*2; a+_",
        "m",
    ),
    # Three steps.
    Kind(
        "two prices",
        (
            BUY,
            "[{p} also [buys|~buys|bought|~takes] {d} {u} [at ${e} each|for ${e} each|that cost ${e} each]|[and |]{d} {u} [at|for] ${e} each]",
        ),
        COST,
        "a*b; d*e; _1+_2",
        "ssss",
    ),
    Kind(
        "gain loss gain",
        (HOLD, GET, LOSE.replace("{b}", "{d}"), GET.replace("{b}", "{e}")),
        NOW,
        "a+b; _-d; _+e",
        "mmmm",
    ),
    Kind(
        "groups two",
        (
            "[There are|{N} ~has|{N} bought] {a} {cc} [with|of] {b} {o} [each|] and {d} {cc} [with|of] {e} {o} each",
        ),
        NOW,
        "a*b; d*e; _1+_2",
        "ssss",
    ),
    Kind(
        "price change plus",
        (BUY, "[{p} also ~buys|{p} also bought] a {u} for ${d}", "{p} [pays|~pays|paid] with ${e}"),
        "[How much change ~does {p} get?|How much [money |]is left?|What is the change?|How much ~does {p} have left?]",
        "a*b; _+d; e-_",
        "ssml",
    ),
)

ASIDES = (
    "{F} is {x} years old",
    "[The shop|The market|The school|The museum] [opens|closes] at {x} o'clock",
    "It is {x} degrees [outside|today|in the sun]",
    "[{F}|{N}] lives at number {x}",
    "[The trip|The walk|The film] takes {x} minutes",
    "{F} has {x} {u}",
    "There are {x} {u} [as well|on the table|in the next room|too]",
    "[{F}'s|Their] house has {x} windows",
    "The [box|bag|book] weighs {x} [kg|pounds|grams]",
    "They have known each other for {x} years",
    "[{F} wakes up|The bus comes|School starts] at {x}",
    "[The street|The town] has {x} [houses|trees|shops]",
)
"""Figures that have nothing to do with the question."""

ASK_FIRST = "[{q} {t}|Question: {q} {t}|{q}\n{t}|Can you tell me this? {q} {t}|I wonder: {q} {t}]"
ASK_LAST = "[{t} {q}|{t} {q}|{t} {q}|{t} {q}|{t}\n{q}|{t} Question: {q}|{t} So, {q}|Please solve: {t} {q}|{t} Tell me: {q}|{t} {q} Show your work.]"
