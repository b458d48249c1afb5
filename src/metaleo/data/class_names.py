"""English names of the miniImageNet classes, whose files name them by WordNet id."""

NAMES = """
n01532829 house finch
n01558993 robin
n01704323 triceratops
n01749939 green mamba
n01770081 harvestman
n01843383 toucan
n01855672 goose
n01910747 jellyfish
n01930112 nematode
n01981276 king crab
n02074367 dugong
n02089867 Walker hound
n02091244 Ibizan hound
n02091831 Saluki
n02099601 golden retriever
n02101006 Gordon setter
n02105505 komondor
n02108089 boxer
n02108551 Tibetan mastiff
n02108915 French bulldog
n02110063 malamute
n02110341 dalmatian
n02111277 Newfoundland
n02113712 miniature poodle
n02114548 white wolf
n02116738 African hunting dog
n02120079 Arctic fox
n02129165 lion
n02138441 meerkat
n02165456 ladybug
n02174001 rhinoceros beetle
n02219486 ant
n02443484 black-footed ferret
n02457408 three-toed sloth
n02606052 rock beauty
n02687172 aircraft carrier
n02747177 ashcan
n02795169 barrel
n02823428 beer bottle
n02871525 bookshop
n02950826 cannon
n02966193 carousel
n02971356 carton
n02981792 catamaran
n03017168 chime
n03047690 clog
n03062245 cocktail shaker
n03075370 combination lock
n03127925 crate
n03146219 cuirass
n03207743 dishrag
n03220513 dome
n03272010 electric guitar
n03337140 file
n03347037 fire screen
n03400231 frying pan
n03417042 garbage truck
n03476684 hair slide
n03527444 holster
n03535780 horizontal bar
n03544143 hourglass
n03584254 iPod
n03676483 lipstick
n03770439 miniskirt
n03773504 missile
n03775546 mixing bowl
n03838899 oboe
n03854065 organ
n03888605 parallel bars
n03908618 pencil box
n03924679 photocopier
n03980874 poncho
n03998194 prayer rug
n04067472 reel
n04146614 school bus
n04149813 scoreboard
n04243546 slot
n04251144 snorkel
n04258138 solar dish
n04275548 spider web
n04296562 stage
n04389033 tank
n04418357 theater curtain
n04435653 tile roof
n04443257 tobacco shop
n04509417 unicycle
n04515003 upright
n04522168 vase
n04596742 wok
n04604644 worm fence
n04612504 yawl
n06794110 street sign
n07584110 consomme
n07613480 trifle
n07697537 hotdog
n07747607 orange
n09246464 cliff
n09256479 coral reef
n13054560 bolete
n13133613 ear
"""
READABLE: dict[str, str] = {line[:9]: line[10:] for line in NAMES.split("\n") if line}


def readable_name(class_name: str) -> str:
    """Return the English name of a WordNet id of miniImageNet, and any other name unchanged."""
    return READABLE.get(class_name, class_name)
