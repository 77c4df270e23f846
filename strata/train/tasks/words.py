"""The words that the spelling tasks and stories use: common English ones, and pseudo-words made of syllables."""

from __future__ import annotations

import random


def listed(text: str) -> list[str]:
    """The words of a space-separated list."""
    return text.split()


ANIMALS = listed(
    "ant bear bee bird cat cow crab crow deer dog donkey dove duck eagle elephant fish fox frog goat goose hen horse "
    "kitten lamb lion lizard monkey moose mouse otter owl panda parrot penguin pig pony puppy rabbit rat raven robin "
    "salmon seal shark sheep snail snake spider squirrel swan tiger turkey turtle whale wolf worm zebra"
)
FOODS = listed(
    "apple banana bean berry biscuit bread butter cabbage cake candy carrot cheese cherry chicken chocolate coffee "
    "cookie corn cream egg flour fruit garlic ginger grape honey jam juice lemon lettuce lime mango meat melon milk "
    "muffin mushroom noodle nut oat oil olive onion orange pancake pasta peach peanut pear pepper pie pizza plum "
    "potato pumpkin rice salad salt sandwich sauce soup spinach steak strawberry sugar tea toast tomato vanilla water "
    "wheat"
)
THINGS = listed(
    "anchor arrow bag ball balloon banner barrel basket bath battery bed bell belt bench bicycle blanket boat book "
    "bottle bowl box bracelet brick bridge broom brush bucket bus button camera candle car card carpet castle chain "
    "chair clock coat coin comb computer crown cup curtain desk dish doll door drawer dress drum engine envelope "
    "feather fence flag flute fork frame glass glove guitar hammer handle hat helmet hook jacket jar jewel kettle key "
    "kite knife ladder lamp lantern letter lock machine map marble mask medal mirror mug nail necklace needle "
    "notebook paddle paint paper pen pencil piano picture pillow pipe plate pocket poster purse puzzle radio ribbon "
    "ring robot rocket rope sail scarf scissors screen shelf shell shirt shoe shovel sock sofa spoon stamp statue "
    "stool string suitcase sword table tent ticket tool towel toy train trumpet truck umbrella vase violin wagon "
    "wallet watch wheel whistle window wire"
)
PLACES_WORDS = listed(
    "airport attic bakery bank barn basement beach bedroom cabin cafe camp cave cellar church city cottage country "
    "desert factory farm field forest garage garden harbor hill hospital hotel house island jungle kitchen lake "
    "library market meadow mill mountain museum ocean office orchard palace park pond port river road school shed "
    "shop stable station street studio swamp temple theater tower town tunnel valley village yard zoo"
)
NATURE = listed(
    "air autumn branch breeze bush cliff cloud coast dawn dew dirt dust earth evening fire flame flower fog frost "
    "grass gravel hail heat ice iron leaf light lightning mist moon morning moss mud night noon pebble petal plant "
    "rain rainbow rock root sand sea season seed shadow sky smoke snow soil spring star stone storm stream summer sun "
    "thunder tree twig wave weather wind winter wood"
)
PEOPLE = listed(
    "actor artist aunt author baby baker boy brother captain carpenter chef child clerk cousin dancer daughter "
    "dentist doctor driver engineer family farmer father fisher friend gardener girl guard guest hunter judge king "
    "knight lady lawyer leader man mayor mother neighbor nephew nurse painter parent pilot pirate player poet prince "
    "princess queen sailor scientist singer sister soldier son student tailor teacher thief uncle waiter woman worker "
    "writer"
)
BODY = listed(
    "ankle arm back beard bone brain cheek chest chin ear elbow eye face finger foot hair hand head heart heel"
)
BODY += listed("hip knee leg lip lung mouth muscle neck nose shoulder skin stomach thumb toe tongue tooth waist wrist")
VERBS = listed(
    "accept admire agree allow answer appear arrive ask bake become begin believe borrow bounce break breathe bring "
    "build burn buy call care carry catch change choose clap clean climb close collect come cook copy count cover "
    "crawl cross cry cut dance decide dig discover divide draw dream drink drive drop eat enjoy enter escape explain "
    "explore fall feed feel fight fill find finish fix float fly fold follow forget forgive give glow grow guess "
    "happen hear help hide hold hope hug hunt hurry imagine improve invite join jump keep kick knock know land laugh "
    "learn leave lend lift like listen live look lose love make mark measure meet mix move need notice offer open "
    "order pack pass pay pick plan play point polish pour practice pray prepare press promise protect pull push put "
    "race reach read receive remember repair repeat rescue rest return ride rise roll run save say search see sell "
    "send serve shake share shine shout show sing sit sleep slide smell smile speak spell spend spin split spread "
    "stand start stay steal stir stop study swim swing take talk taste teach tell thank think throw tie touch trade "
    "travel treat trust try turn understand use visit wait wake walk want warn wash wear win wink wish wonder work "
    "worry wrap write yawn"
)
QUALITIES = listed(
    "able afraid alone ancient angry awake bad beautiful big bitter black blue bold brave bright broken brown busy "
    "calm careful cheap clever cold common cool correct cozy curious damp dark dear deep different difficult dry dull "
    "early easy empty equal exact fair famous fast few final fine first flat free fresh friendly full funny gentle "
    "giant glad golden good grand gray great green happy hard heavy helpful hidden high hollow honest hot huge hungry "
    "important kind large last late lazy light little lonely long loud low lucky magic mean merry mighty narrow near "
    "neat new nice noisy odd old open orange pale patient perfect plain polite poor pretty proud purple quick quiet "
    "rare ready red rich right ripe rough round royal rude sad safe second secret shallow sharp shiny short shy sick "
    "silent silly silver simple slow small smart smooth soft sour special steep sticky still straight strange strong "
    "sudden sunny sweet tall tame tasty thick thin third tidy tiny tired true ugly useful warm weak wet white whole "
    "wide wild wise wonderful wooden wrong yellow young"
)
OTHERS = listed(
    "about above across after again almost always among another around before behind below beside better between "
    "beyond both circle color corner danger during east edge eight either eleven end enough every example fact five "
    "forty four future game gift group half history hour hundred idea inside instead job journey joy kingdom language "
    "lesson life line list luck many maybe member memory middle minute mistake moment money month music mystery name "
    "nation nature never news nine north nothing number often once only other outside page pair part past path peace "
    "people piece power present price prize problem question rather reason rest result rhyme riddle row rule science "
    "secret sense seven several shape side since six size someone something song sound south speed sport square story "
    "strength team ten test their thirty thousand three time today together tomorrow toward treasure trick trip "
    "triangle trouble truth twelve twenty under until upon vacation value voice week west while wisdom without word "
    "world year yesterday zero keyboard mathematics internet software hardware language planet galaxy oxygen energy "
    "gravity magnet crystal diamond pyramid festival holiday birthday breakfast dinner lunch supper alphabet sentence "
    "paragraph chapter dictionary calendar december january february october september november august july june "
    "april march"
)

WORDS: tuple[str, ...] = tuple(
    sorted({*ANIMALS, *FOODS, *THINGS, *PLACES_WORDS, *NATURE, *PEOPLE, *BODY, *VERBS, *QUALITIES, *OTHERS})
)

NAMES = listed(
    "Ada Alan Alice Amir Anna Ben Bruno Carla Chen Clara Dan Dina Elena Emil Emma Eva Felix Finn Grace Hana Hugo Ida "
    "Ivan Jack Jana Kai Karim Kate Lena Leo Lily Lina Luca Maria Mark Max Mia Mila Nina Noah Nora Olga Omar Oscar "
    "Paul Peter Rita Rosa Ruth Sam Sara Sofia Theo Tim Tina Tom Uma Vera Victor Will Yara Yuki Zoe"
)

ONSETS = listed(
    "b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr fl fr gl gr pl pr sh sk sl sp st th tr tw wh"
)
VOWELS = listed("a e i o u a e i o u ai ea ee oo ou ay y")
CODAS = listed("b d g k l m n p r s t x ck ld ll mp nd ng nk nt rd rk rn rt sh ss st th")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

SHORTEST, LONGEST = 3, 10


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable word of no language, 3 to 10 letters."""
    while True:
        word = ""
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
            word += rng.choice(ONSETS) if rng.random() < 0.85 else ""
            word += rng.choice(VOWELS)
            word += rng.choice(CODAS) if rng.random() < 0.4 else ""
        if SHORTEST <= len(word) <= LONGEST:
            return word


def letter_string(rng: random.Random) -> str:
    """Three to eight random letters."""
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(3, 9)))


def any_word(rng: random.Random) -> str:
    """A word to spell: mostly real or pronounceable, sometimes letters at random."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(SPELLABLE)
    return pseudo_word(rng) if draw < 0.90 else letter_string(rng)


SPELLABLE = tuple(word for word in WORDS if SHORTEST <= len(word) <= LONGEST)
