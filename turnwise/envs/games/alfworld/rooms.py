"""Types of household objects, their possible places, and a few floor plans to play on when no
others are given."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turnwise.json_lines import read_json
from turnwise.seeding import derive_seed

FOOD = frozenset({"Apple", "Bread", "Egg", "Lettuce", "Potato", "Tomato"})
CUTLERY = frozenset({"ButterKnife", "Fork", "Knife", "Ladle", "Spatula", "Spoon"})
DISHES = frozenset({"Bowl", "Cup", "Mug", "Plate"})
COOKWARE = frozenset({"Kettle", "Pan", "Pot"})
BOTTLES = frozenset({"Glassbottle", "SoapBottle", "SprayBottle", "WineBottle"})
SHAKERS = frozenset({"PepperShaker", "SaltShaker"})
STATIONERY = frozenset({"Book", "CD", "Newspaper", "Pen", "Pencil"})
POCKET = frozenset({"CellPhone", "CreditCard", "KeyChain", "RemoteControl", "Watch"})
DECOR = frozenset({"Box", "Candle", "Statue", "TissueBox", "Vase"})
LINEN = frozenset({"Cloth", "HandTowel"})
WASHING = frozenset({"DishSponge", "SoapBar", "ToiletPaper"})
SPORT = frozenset({"BaseballBat", "BasketBall", "TennisRacket"})

TABLETOP = DISHES | STATIONERY | POCKET | DECOR | frozenset({"AlarmClock", "Laptop"})

HOLDS: Mapping[str, frozenset[str]] = {
    "ArmChair": POCKET | frozenset({"Book", "Laptop", "Newspaper", "Pillow"}),
    "BathtubBasin": LINEN | WASHING - {"ToiletPaper"},
    "Bed": SPORT | frozenset({"Book", "CellPhone", "Laptop", "Pillow"}),
    "Cabinet": DISHES | COOKWARE | BOTTLES | SHAKERS | LINEN | WASHING | DECOR - {"Statue"},
    "Cart": LINEN | WASHING | frozenset({"Candle", "SoapBottle", "SprayBottle", "TissueBox"}),
    "CoffeeMachine": frozenset({"Mug"}),
    "CoffeeTable": TABLETOP - {"Bowl", "Cup", "Mug", "AlarmClock"},
    "CounterTop": FOOD
    | CUTLERY
    | DISHES
    | COOKWARE
    | BOTTLES
    | SHAKERS
    | LINEN
    | WASHING
    | DECOR - {"Box"},
    "Desk": TABLETOP | SPORT - {"BaseballBat"},
    "DiningTable": FOOD | CUTLERY | COOKWARE | SHAKERS | TABLETOP | frozenset({"WineBottle"}),
    "Drawer": CUTLERY
    | SHAKERS
    | STATIONERY
    | POCKET
    | LINEN
    | WASHING
    | frozenset({"SoapBottle", "SprayBottle"}),
    "Dresser": TABLETOP | SPORT - {"BaseballBat"},
    "Fridge": FOOD | DISHES | frozenset({"Glassbottle", "Pan", "Pot", "WineBottle"}),
    "GarbageCan": FOOD | LINEN | WASHING | BOTTLES | STATIONERY - {"Book"},
    "HandTowelHolder": frozenset({"HandTowel"}),
    "LaundryHamper": frozenset({"Cloth"}),
    "Microwave": DISHES | FOOD - {"Lettuce"},
    "Ottoman": POCKET | frozenset({"Book", "Laptop", "Newspaper", "Pillow"}),
    "Safe": POCKET - {"RemoteControl"} | frozenset({"CD", "Statue", "Vase"}),
    "Shelf": TABLETOP | BOTTLES | SHAKERS | LINEN | WASHING | frozenset({"Kettle", "Pot"}),
    "SideTable": TABLETOP | FOOD | CUTLERY - {"Ladle"} | SPORT,
    "SinkBasin": DISHES
    | CUTLERY
    | COOKWARE
    | LINEN
    | (FOOD - {"Bread"})
    | (WASHING - {"ToiletPaper"}),
    "Sofa": POCKET | frozenset({"Book", "Box", "Laptop", "Newspaper", "Pillow"}),
    "StoveBurner": COOKWARE,
    "TVStand": POCKET | STATIONERY | DECOR,
    "Toilet": LINEN | WASHING | frozenset({"Candle", "SoapBottle", "SprayBottle", "TissueBox"}),
    "ToiletPaperHanger": frozenset({"ToiletPaper"}),
    "TowelHolder": frozenset({"Towel"}),
}
"""Receptacle -> what may lie in or on it. Everything that may lie somewhere can be picked up."""

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
CLEANABLE = (
    DISHES
    | CUTLERY
    | COOKWARE
    | LINEN - {"HandTowel"}
    | FOOD - {"Bread"}
    | frozenset({"DishSponge", "SoapBar"})
)
HEATABLE = FOOD - {"Lettuce"} | DISHES - {"Bowl"}
COOLABLE = FOOD | DISHES | frozenset({"Pan", "Pot", "WineBottle"})
VESSELS = DISHES | frozenset({"Box", "Pan", "Pot"})
LAMP = "DeskLamp"
LAMP_STANDS_ON = frozenset({"Desk", "Dresser", "Shelf", "SideTable"})

_BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
_HELD_OUT_EVERY = 5

_BELONGS: Mapping[str, frozenset[str]] = {
    "kitchen": FOOD
    | CUTLERY
    | DISHES
    | COOKWARE
    | BOTTLES
    | SHAKERS
    | frozenset({"Cloth", "DishSponge", "Vase"}),
    "livingroom": STATIONERY
    | POCKET
    | DECOR
    | frozenset({"Laptop", "Mug", "Pillow", "Plate", LAMP}),
    "bedroom": STATIONERY
    | POCKET
    | SPORT
    | frozenset({"AlarmClock", "Box", "Cloth", "Laptop", "Mug", "Pillow", LAMP}),
    "bathroom": LINEN
    | WASHING
    | frozenset({"Candle", "SoapBottle", "SprayBottle", "TissueBox", "Towel"}),
}
"""Sort of room -> what is found in the sample rooms of that sort."""

_KITCHEN = "CounterTop DiningTable Fridge GarbageCan Microwave SinkBasin"
_SAMPLE: Mapping[str, str] = {
    "kitchen 1": f"{_KITCHEN} CounterTop Cabinet*6 Drawer*4 StoveBurner*4 CoffeeMachine",
    "kitchen 2": f"{_KITCHEN} Cabinet*4 Drawer*2 StoveBurner*2 Shelf*2",
    "kitchen 3": "CounterTop*3 Fridge GarbageCan Microwave SinkBasin Cabinet*9 Drawer*6 StoveBurner*4 CoffeeMachine",
    "kitchen 4": "CounterTop Fridge GarbageCan Microwave SinkBasin SideTable Shelf*3 StoveBurner*4 Drawer*3",
    "kitchen 5": f"{_KITCHEN} Cabinet*5 Drawer*5 StoveBurner*4 CoffeeMachine Shelf",
    "living room 1": "Sofa ArmChair*2 CoffeeTable SideTable*2 Drawer*2 Shelf*2 GarbageCan",
    "living room 2": "Sofa DiningTable Dresser Cabinet*4 TVStand GarbageCan SideTable",
    "living room 3": "Sofa*2 CoffeeTable*2 Desk Drawer*4 Safe Shelf*4 GarbageCan",
    "living room 4": "ArmChair*3 Ottoman SideTable*3 Drawer*5 GarbageCan",
    "living room 5": "Sofa ArmChair CoffeeTable Desk SideTable Drawer*3 Cabinet*2 GarbageCan",
    "bedroom 1": "Bed Desk Drawer*4 Shelf*2 GarbageCan SideTable",
    "bedroom 2": "Bed Dresser SideTable*2 Drawer*6 Safe GarbageCan LaundryHamper",
    "bedroom 3": "Bed Desk*2 Shelf*8 Drawer*3 ArmChair GarbageCan",
    "bedroom 4": "Bed*2 Dresser Desk Drawer*4 Safe GarbageCan",
    "bedroom 5": "Bed Desk SideTable Drawer*5 Shelf*4 LaundryHamper GarbageCan",
    "bathroom 1": "SinkBasin CounterTop Toilet ToiletPaperHanger HandTowelHolder TowelHolder Cabinet*4 GarbageCan",
    "bathroom 2": "SinkBasin*2 CounterTop Toilet BathtubBasin ToiletPaperHanger Drawer*4 GarbageCan Shelf",
    "bathroom 3": "SinkBasin Toilet Cart Cabinet*2 HandTowelHolder*2 ToiletPaperHanger GarbageCan CounterTop",
    "bathroom 4": "SinkBasin*2 Toilet CounterTop*2 Drawer*6 TowelHolder ToiletPaperHanger GarbageCan",
    "bathroom 5": "SinkBasin CounterTop Toilet BathtubBasin Cabinet*3 Drawer*2 ToiletPaperHanger GarbageCan",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Receptacle:
    """A piece of furniture of a floor plan."""

    id: str
    """Such as "Drawer|+01.00|+00.25|-02.00": the type first, then where it stands."""
    kind: str
    """The type; of the basins it is the last part of the id."""
    place: str
    """Where one stands to use it, such as "loc|4|-3|2|60". Several receptacles may share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FloorPlan:
    """A room: its furniture, and the types of things that may be in it.

    Example:
        >>> plan = sample_plans()[0]
        >>> plan.name, plan.held_out, plan.receptacles[0].kind, "Egg" in plan.objects
        ('bathroom1', False, 'SinkBasin', False)
    """

    name: str
    receptacles: tuple[Receptacle, ...]
    objects: frozenset[str]
    held_out: bool
    """True: only validation games are played here."""

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(receptacle.kind for receptacle in self.receptacles)


def sample_plans() -> tuple[FloorPlan, ...]:
    """Twenty rooms of four sorts, written for this project; one room in five is held out for
    validation."""
    plans: list[FloorPlan] = []
    for index, (name, furniture) in enumerate(sorted(_SAMPLE.items())):
        plans.append(_furnish(name.replace(" ", ""), furniture, held_out=_is_held_out(index)))
    return tuple(plans)


def load_plans(path: str | Path) -> tuple[FloorPlan, ...]:
    """The floor plans of a JSON file, gzipped or not: {number: {"receptacles": {id: pose},
    "objects": [type, ...]}}.

    Within each hundred of numbers, which ALFRED gives to one sort of room, every fifth plan is held
    out.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"floor plans are read from a JSON file (.json or .json.gz), there is none at {file}"
        )
    return read_json(file, _plans)


def _plans(data: Mapping[str, Mapping[str, Any]]) -> tuple[FloorPlan, ...]:
    seen: Counter[int] = Counter()
    plans: list[FloorPlan] = []
    for number in sorted(data, key=int):
        row, group = data[number], int(number) // 100
        receptacles = tuple(
            Receptacle(id=name, kind=_kind(name), place="|".join(["loc", *map(str, pose)]))
            for name, pose in cast(Mapping[str, list[float]], row["receptacles"]).items()
            if _kind(name) in HOLDS
        )
        held_out = _is_held_out(seen[group])
        seen[group] += 1
        objects = frozenset(map(str, row["objects"]))
        plans.append(
            FloorPlan(
                name=f"FloorPlan{number}",
                receptacles=receptacles,
                objects=objects,
                held_out=held_out,
            )
        )
    return tuple(plans)


def _is_held_out(index: int) -> bool:
    return index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


def _kind(name: str) -> str:
    parts = name.split("|")
    return parts[-1] if parts[-1].endswith("Basin") else parts[0]


def _furnish(name: str, furniture: str, *, held_out: bool) -> FloorPlan:
    receptacles: list[Receptacle] = []
    for position, item in enumerate(furniture.split()):
        kind, _, count = item.partition("*")
        for index in range(int(count or 1)):
            # Chests and racks: two drawers or shelves are used from the same place.
            step = index // 2 if kind in ("Drawer", "Shelf") else index
            first, last = _BASINS.get(kind, kind), f"|{kind}" if kind in _BASINS else ""
            # Ids decide how things are numbered, so they carry digits that look arbitrary, as those
            # of real rooms do.
            height = derive_seed(position, f"height {name} {kind}", index) % 200
            metres, rest = divmod(height, 100)
            where = f"+{position:02d}.{step:02d}|+{metres:02d}.{rest:02d}|-{index:02d}.50"
            receptacles.append(
                Receptacle(
                    id=f"{first}|{where}{last}", kind=kind, place=f"loc|{position}|-{step}|0|60"
                )
            )
    kinds = {receptacle.kind for receptacle in receptacles}
    movable = frozenset(thing for kind in kinds for thing in HOLDS[kind])
    objects = movable & _BELONGS[name.rstrip("0123456789")]
    if LAMP in _BELONGS[name.rstrip("0123456789")] and kinds & LAMP_STANDS_ON:
        objects |= {LAMP}
    return FloorPlan(name=name, receptacles=tuple(receptacles), objects=objects, held_out=held_out)
